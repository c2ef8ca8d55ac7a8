"""The compiler's process with a build that does what its source says: for tests of what becomes of workers."""

from __future__ import annotations

import os
import signal
import time

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.child import serve
from pagedray.engine.grammar.wire import Job


def build(job: Job) -> bytes:
    order, _, argument = job.source.text.partition(" ")
    if order == "sleep":
        time.sleep(float(argument))
    elif order == "spin":
        end_s = time.process_time() + float(argument)
        while time.process_time() < end_s:
            pass
    elif order == "eat":
        hoard = []
        while True:
            hoard.append(bytearray(2**28))
    elif order == "recurse":
        return build(job)
    elif order == "signal":
        os.kill(os.getpid(), getattr(signal, argument))
    elif order == "exit":
        os._exit(int(argument))
    elif order == "refuse":
        raise UserError(argument)
    elif order == "pid":
        return str(os.getpid()).encode()
    elif order == "large":
        return bytes(int(argument))
    return job.source.text.encode()


def main() -> None:
    serve(lambda vocabulary: build)
