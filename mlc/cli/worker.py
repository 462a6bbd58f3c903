"""``mlc worker``: offer this machine to tuning runs on others."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import NoReturn

from mlc.cli.outcome import Command, Outcome
from mlc.config import get
from mlc.errors import MeasureError, UsageError
from mlc.installation import check_pins

__all__ = ["COMMAND"]

_EPILOG = """a worker runs code that it is sent:
  Clients must know the token in MLC_TOKEN; set the same for workers and tuning runs. With --rpc, and with --class where
  it starts a cluster, the worker listens on the loopback address only: reach it from elsewhere through a tunnel
  (ssh -L). With --address, Ray listens on all addresses.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--class", dest="class_name", metavar="NAME",
                       help="join a Ray cluster, or start one, as a machine of this class")
    which.add_argument("--rpc", metavar="HOST:PORT/KEY", help="register with TVM's RPC tracker there under KEY")
    parser.add_argument("--address", metavar="HOST:PORT",
                        help="with --class: join this cluster (default: start one at 127.0.0.1:6379)")


def _execute(args: argparse.Namespace) -> Outcome:
    if not get("MLC_TOKEN"):
        raise UsageError("a worker runs code that it is sent, so MLC_TOKEN must hold a secret that runs must know; "
                         "make one with `export MLC_TOKEN=$(openssl rand -hex 32)`")
    if args.class_name:
        check_pins()
        _join(args.class_name, args.address)
    if args.address:
        raise UsageError("--address goes with --class; --rpc has the tracker's address itself")
    from mlc.measure.executors import parse
    from mlc.measure.rpc_server import serve

    address = parse(f"rpc://{args.rpc}")
    assert address is not None
    serve(address.place, address.name)
    return Outcome({"worker": args.rpc})


def _join(class_name: str, address: str | None) -> NoReturn:
    """Become Ray's own command, which stays until it is ended."""
    from mlc.measure.ray_devices import LOOPBACK, authentication, loopback, need_ray, options, resources_text

    if not re.fullmatch(r"[\w.-]+", class_name):
        raise UsageError(f"a class's name must be letters, digits, '.', '_' and '-', got {class_name!r}")
    need_ray()
    chosen = options(class_name)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
               f"--num-cpus={chosen['num_cpus']}", f"--object-store-memory={chosen['object_store_memory']}",
               f"--resources={resources_text(class_name)}"]
    command += [f"--address={address}"] if address else ["--head", "--include-dashboard=false"]
    command += [] if address else [f"--node-ip-address={LOOPBACK}"]
    alone = {} if address else loopback("")  # Ray lets no second node join what has the loopback address alone
    try:
        os.execve(sys.executable, command, {**os.environ, **alone, **authentication()})
    except OSError as error:
        raise MeasureError(f"Ray must start, but does not ({error.strerror}); look at `mlc doctor`") from error


# with --rpc a board has TVM's runtime alone, and the session compares the versions
COMMAND = Command("worker", "offer this machine to tuning runs elsewhere", _add_arguments, _execute, needs_tvm=False,
                  epilog=_EPILOG)
