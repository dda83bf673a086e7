"""`python -m sac_search` is `sac-search`, and under `torchrun` all ranks are one."""

import sys

from sac_search.distributed import run_on_all_ranks


def main() -> int:
    """Runs the command line, which a rank that only follows never loads."""
    from sac_search import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(run_on_all_ranks(main))
