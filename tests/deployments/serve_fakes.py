"""`pagedray serve` with a fake model: python -m tests.deployments.serve_fakes [--flags of pagedray serve]."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from pagedray.deployments.build import Parts
from pagedray.deployments.cli import parser
from pagedray.deployments.commands.settings import read_config
from pagedray.deployments.phases import Phases
from pagedray.deployments.proxy import end_haproxy, listener

PARTS = Parts(worker="tests.fakes:SlowFakeWorker", tokenizer="tests.fakes:ByteTokenizer")


def main() -> None:
    config = read_config(parser().parse_args(["serve", *sys.argv[1:]]), {})
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp") as folder:
        listen, _ = listener(config.server, Path(folder))
        os.environ.update(listen.environment)
        from pagedray.deployments.launch import Launch

        try:
            Launch(config, listen, None, Phases(sys.stdout, time.time()), PARTS).run()
        finally:
            end_haproxy(Path(folder))


if __name__ == "__main__":
    main()
