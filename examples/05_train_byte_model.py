"""Train a small byte-level language model with mixture-of-experts layers on four virtual ranks.

    python examples/05_train_byte_model.py                    # Python's own help texts, 60 steps
    python examples/05_train_byte_model.py my_notes.txt 200   # another text, more steps

Every sum has a fixed order, so the loss of each step has the same bits on any number of ranks:
the script trains the first steps again on one rank and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mok_ref.bench.entry import one_line_errors, script_parser
from mok_ref.heap import run_ranks
from mok_ref.training.balance import BalanceOptions
from mok_ref.training.data import load_text
from mok_ref.training.loop import train
from mok_ref.training.parameters import ModelConfig
from mok_ref.training.trainer import TrainConfig

RANKS = 4
COMPARED_STEPS = 5
MODEL = ModelConfig(
    sequence=32, hidden=32, num_layers=1, num_heads=2, intermediate=32, num_experts=8
)


def show(record: dict) -> None:
    step = record["step"] + 1
    if step % 10 == 0 or step <= COMPARED_STEPS:
        loads = record["layers"][0]["load"]
        print(
            f"step {step:4d}  loss {record['loss']:.4f}  bits {record['loss_bits']}  load {loads}"
        )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("text", nargs="?", type=Path, help="a file of at least 4096 bytes")
    parser.add_argument("steps", nargs="?", type=int, default=60, help="default: %(default)s")
    arguments = parser.parse_args()
    text, steps = load_text(arguments.text), arguments.steps
    balance = BalanceOptions(kitten=0.01)
    config = TrainConfig(MODEL, steps=steps, batch=8, balance=balance, valid_every=steps)
    print(f"{text.source}: {len(text.train)} bytes to train on, {len(text.valid)} held out")
    records = run_ranks(RANKS, lambda heap: train(config, heap, text, progress=show))[0]
    print(f"validation loss {records[-1]['valid_loss']:.4f} nats per byte")
    again = run_ranks(1, lambda heap: train(config, heap, text, stop_at=COMPARED_STEPS))[0]
    same = [a["loss_bits"] == b["loss_bits"] for a, b in zip(records, again)]
    print(f"first {COMPARED_STEPS} steps on 1 rank: {'same bits' if all(same) else 'DIFFERENT'}")
    if not all(same):
        sys.exit(1)


if __name__ == "__main__":
    with one_line_errors():
        main()
