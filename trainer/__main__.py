"""`python -m trainer`: see `trainer.cli.train`."""

from trainer.cli.train import command

if __name__ == "__main__":
    command()
