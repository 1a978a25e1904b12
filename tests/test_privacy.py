"""Nothing leaves the device: seen from outside, by system calls, in an environment without CI."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.required import need
from tools import network

ROOT = Path(__file__).resolve().parents[1]
TELLS = tuple(map(int, metadata.version("onnxruntime").split(".")[:2])) >= (1, 29) and sys.platform == "linux"

# only onnxruntime, imported as usual
ALONE = "import onnxruntime; onnxruntime.SessionOptions(); onnxruntime.get_available_providers()"
BEFORE = "import onnxruntime, edgespec"
AFTER = "import edgespec, onnxruntime, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"


def test_a_day_without_a_network_call(tmp_path: Path) -> None:
    """Commands and Python do nothing of the kind; the server has one loopback address."""
    need("strace", "to see system calls with")
    home = tmp_path / "home"
    home.mkdir()
    done = list(network.day(tmp_path / "demo", home))
    assert {one.name: network.wrong(one) for one in done if network.wrong(one)} == {}
    assert {one.name for one in done} >= {"export", "run", "verify", "bench", "serve", "import edgespec"}
    assert done[-1].calls  # the test can detect calls: it sees the server's own address


@pytest.mark.skipif(not TELLS, reason="this ONNX Runtime has no telemetry outside of Windows")
def test_what_is_looked_for_is_there_without_edgespec(tmp_path: Path) -> None:
    """ONNX Runtime without edgespec writes an identifier of the device: the test would detect it."""
    for code, told in ((ALONE, True), (AFTER, False)):
        home = tmp_path / str(told)
        home.mkdir()
        subprocess.run([sys.executable, "-c", code], env=network.environment(home), cwd=ROOT, check=True, timeout=120)
        assert bool(network.left_in(home)) == told


def test_a_variable_that_allows_it_is_overruled(tmp_path: Path) -> None:
    environment = network.environment(tmp_path) | {"ORT_DISABLE_TELEMETRY": "0"}
    done = subprocess.run(
        [sys.executable, "-c", AFTER], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "1\n"
    assert network.left_in(tmp_path) == ()


def test_an_import_that_came_too_early_is_said(tmp_path: Path) -> None:
    """The effects of another import cannot be undone, so they are reported."""
    for told in (True, False):
        environment = network.environment(tmp_path) | ({} if told else {"ORT_DISABLE_TELEMETRY": "1"})
        done = subprocess.run(
            [sys.executable, "-c", BEFORE], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert ("onnxruntime was imported before edgespec" in done.stderr) == told


def test_lines_of_a_log() -> None:
    """DNS by a connected socket, IPv6, a message to an address; local sockets and sends of a pipe do not count."""
    far = (
        "7 socket(AF_INET6, SOCK_DGRAM, IPPROTO_IP) = 9",
        '7 connect(8, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("10.0.0.1")}, 16) = 0',
        '7 sendto(8, "x", 1, 0, {sa_family=AF_INET6, sin6_port=htons(1), sin6_addr="::1"}, 28) = 1',
    )
    near = (
        '7 connect(8, {sa_family=AF_UNIX, sun_path="/run/nscd/socket"}, 110) = -1 ENOENT',
        '7 sendto(6, "\\0", 1, 0, NULL, 0) = 1',
        "7 socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE) = 4",
    )
    assert network.network_calls("\n".join((*far, *near))) == list(far)
    other = network.Traced("serve", 0, "", (far[1].replace("connect", "bind"),), ())
    assert network.wrong(other) == list(other.calls)  # an address that is not loopback's
