"""Training around the layer: routers, balance, capacity, unlocking, alarms, optimizer, checkpoints.

Start with `loop.train` (a whole run), then `trainer.Trainer` (one step), then `model.Model`
(forward above its backward). docs/training.md lists the equations.
"""
