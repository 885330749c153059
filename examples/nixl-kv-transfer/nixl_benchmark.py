# ruff: noqa: D102, D103, T201 (a script that has to stay small; its output is its purpose)
"""One NIXL transfer between two pods: a target registers a buffer, an initiator moves it again and again.

The initiator prints one line, `RESULT {json}`. The script stands alone, so that a ConfigMap can carry it into
any image with Python, NIXL and numpy (and torch for GPU memory). `rackloom transfer` measures the same and
proves which device carried the bytes.

The two ends talk over a TCP connection in frames of JSON; nothing is unpickled. Where NIXL_BENCHMARK_SECRET
is set, at both ends, every frame is authenticated; without it whoever can connect could name the memory that
is written, so leave the NetworkPolicy beside this file in place.
"""

import argparse
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import struct
import sys
import time

SECRET = os.environ.get("NIXL_BENCHMARK_SECRET", "").encode()
HEAD = struct.Struct("!I32s")
MAX_FRAME = 8 << 20
CHUNK = 64 << 20


class Channel:
    """JSON frames: 4 bytes of length, HMAC-SHA256 over sender, sequence number and body, body."""

    def __init__(self, sock: socket.socket, deadline: float, mine: str) -> None:
        self.sock, self.deadline, self.mine = sock, deadline, mine
        self.theirs = "initiator" if mine == "target" else "target"
        self.sent = self.received = 0
        self.key = SECRET
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_hex(16)
        self.send({"nonce": nonce})
        nonces = {mine: nonce, self.theirs: str(self.receive()["nonce"])}
        # Fresh for every connection, so that no frame of an earlier one can be replayed.
        self.key = hmac.digest(SECRET, (nonces["initiator"] + nonces["target"]).encode(), "sha256")

    def send(self, message: dict) -> None:
        body = json.dumps(message).encode()
        self.arm()
        self.sock.sendall(HEAD.pack(len(body), self.mac(self.mine, self.sent, body)) + body)
        self.sent += 1

    def receive(self) -> dict:
        size, mac = HEAD.unpack(self.exactly(HEAD.size))
        if size > MAX_FRAME:
            sys.exit(f"the peer announced a frame of {size} bytes: it is no nixl_benchmark.py")
        body = self.exactly(size)
        if not hmac.compare_digest(mac, self.mac(self.theirs, self.received, body)):
            sys.exit("the peer holds another NIXL_BENCHMARK_SECRET, or a frame was altered")
        self.received += 1
        return json.loads(body)

    def mac(self, sender: str, sequence: int, body: bytes) -> bytes:
        return hmac.digest(self.key, f"{sender} {sequence} ".encode() + body, "sha256")

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self.arm()
            piece = self.sock.recv(size - len(data))
            if not piece:
                sys.exit("the peer ended before the measurement was over")
            data += piece
        return data

    def peer_is_there(self) -> bool:
        try:
            self.sock.setblocking(False)
            return self.sock.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            sys.exit("timed out")
        self.sock.settimeout(left)


class Buffer:
    """`size` bytes of host or GPU memory."""

    def __init__(self, device: str, size: int) -> None:
        self.size, self.cuda = size, device != "cpu"
        if self.cuda:
            import torch

            self.array = torch.empty(size, dtype=torch.uint8, device=device)
            self.index, self.address, self.kind = self.array.device.index, self.array.data_ptr(), "VRAM"
        else:
            import numpy as np

            self.array = np.empty(size, np.uint8)
            self.index, self.address, self.kind = 0, self.array.ctypes.data, "DRAM"

    def fill(self, value: int) -> None:
        """A pattern that differs at every position within a chunk; 0 wipes."""
        for start in range(0, self.size, CHUNK):
            part = self.array[start : start + CHUNK]
            if value == 0:
                part[:] = 0
            elif self.cuda:
                import torch

                generator = torch.Generator(device=part.device).manual_seed(value + start)
                part.random_(0, 256, generator=generator)
            else:
                import numpy as np

                part[:] = np.random.default_rng(value + start).integers(0, 256, part.size, np.uint8)
        self.wait()

    def digest(self) -> str:
        hasher = hashlib.blake2b(digest_size=32)
        for start in range(0, self.size, CHUNK):
            part = self.array[start : start + CHUNK]
            hasher.update((part.cpu().numpy() if self.cuda else part).data)
        return hasher.hexdigest()

    def wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def blocks(self, size: int) -> list:
        return [(self.address + offset, size, self.index) for offset in range(0, self.size, size)]


def open_agent(args: argparse.Namespace, buffer: Buffer) -> tuple:
    from nixl._api import nixl_agent, nixl_agent_config

    # Software transports move data only while somebody drives them: a target without a progress thread is
    # sixteen times slower over TCP.
    progress = args.progress_thread or args.mode == "target"
    config = nixl_agent_config(
        enable_prog_thread=progress, num_threads=args.backend_threads, backends=[args.backend]
    )
    agent = nixl_agent(args.mode, config)
    registered = agent.register_memory([(buffer.address, buffer.size, buffer.index, "")], buffer.kind)
    return agent, registered


def target(args: argparse.Namespace, deadline: float) -> int:
    buffer = Buffer(args.device, args.block_size * args.batch_size)
    agent, registered = open_agent(args, buffer)
    with socket.create_server(("", args.port), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        print(json.dumps({"event": "target_ready", "port": args.port}), flush=True)
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        sock, _ = listener.accept()
    with sock:
        channel = Channel(sock, deadline, "target")
        buffer.fill(7 if args.op == "READ" else 0)
        channel.send(
            {
                "metadata": agent.get_agent_metadata().hex(),
                "blocks": buffer.blocks(args.block_size),
                "kind": buffer.kind,
            }
        )
        channel.receive()  # warm-ups are over: their data must not pass for timed data
        if args.op == "WRITE":
            buffer.fill(0)
        channel.send({})
        channel.receive()  # the last iteration is complete
        channel.send({"digest": buffer.digest()})
    agent.deregister_memory(registered)
    print(json.dumps({"event": "target_done"}), flush=True)
    return 0


def initiator(args: argparse.Namespace, deadline: float) -> int:
    buffer = Buffer(args.device, args.block_size * args.batch_size)
    agent, registered = open_agent(args, buffer)
    with reach(args.target_host, args.port, deadline) as sock:
        channel = Channel(sock, deadline, "initiator")
        there = channel.receive()
        if [size for _, size, _ in there["blocks"]] != [args.block_size] * args.batch_size:
            sys.exit(
                "the target registered another size: give both ends the same --block-size and --batch-size"
            )
        buffer.fill(7 if args.op == "WRITE" else 0)
        name = agent.add_remote_agent(bytes.fromhex(there["metadata"]))
        peer = name.decode() if isinstance(name, bytes) else name
        agent.make_connection(peer)
        local = agent.get_xfer_descs(buffer.blocks(args.block_size), buffer.kind)
        remote = agent.get_xfer_descs([tuple(block) for block in there["blocks"]], there["kind"])
        request = agent.initialize_xfer(args.op, local, remote, peer, backends=[args.backend])
        for _ in range(args.warmup_iters):
            move(agent, request, channel)
        channel.send({})
        if args.op == "READ":
            buffer.fill(0)
        channel.receive()
        seconds = [move(agent, request, channel) for _ in range(args.iters)]
        channel.send({})
        verified = channel.receive()["digest"] == buffer.digest()
    print("RESULT " + json.dumps(result(args, buffer.size, seconds) | {"verified": verified}), flush=True)
    agent.release_xfer_handle(request)
    agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)
    return 0 if verified else 1


def reach(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to a target that may still be starting, and whose name may not resolve yet."""
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"the target at {host} port {port} does not answer: {error}")
            time.sleep(1)


def move(agent: object, request: object, channel: Channel) -> float:
    """Seconds of one transfer."""
    start = time.perf_counter()
    state = agent.transfer(request)
    look = start + 1
    while state == "PROC":
        state = agent.check_xfer_state(request)
        if time.perf_counter() > look:
            if time.monotonic() > channel.deadline:
                sys.exit("timed out in the middle of a transfer")
            if not channel.peer_is_there():
                sys.exit("the target ended in the middle of a transfer")
            look += 1
    if state != "DONE":
        sys.exit(f"NIXL reported {state}")
    return time.perf_counter() - start


def result(args: argparse.Namespace, size: int, seconds: list) -> dict:
    ordered = sorted(seconds)
    average = sum(ordered) / len(ordered)

    def percentile(percent: float) -> float:
        position = (len(ordered) - 1) * percent / 100
        low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
        return low + (high - low) * (position - math.floor(position))

    return {
        "event": "result",
        "backend": args.backend,
        "requested_backend": args.backend,
        "op": args.op,
        "device": args.device,
        "block_size": args.block_size,
        "batch_size": args.batch_size,
        "total_bytes": size,
        "iters": args.iters,
        "warmup_iters": args.warmup_iters,
        "avg_seconds": average,
        "min_seconds": ordered[0],
        "p50_seconds": percentile(50),
        "p95_seconds": percentile(95),
        "p99_seconds": percentile(99),
        "avg_GBps": size / average / 1e9,
        "net_devices": os.environ.get("UCX_NET_DEVICES"),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Move a buffer between two pods with NIXL and time it.")
    parser.add_argument("--mode", choices=("target", "initiator"), required=True)
    parser.add_argument("--target-host", help="where the initiator finds the target")
    parser.add_argument("--port", type=int, default=5555)
    parser.add_argument("--backend", default="UCX")
    parser.add_argument("--op", choices=("READ", "WRITE"), default="WRITE")
    parser.add_argument("--device", default="cuda:0", help="cuda:N or cpu")
    parser.add_argument("--block-size", type=int, default=256 << 20, help="bytes")
    parser.add_argument("--batch-size", type=int, default=1, help="blocks in one request")
    parser.add_argument("--iters", type=int, default=100)
    parser.add_argument("--warmup-iters", type=int, default=20)
    parser.add_argument("--backend-threads", type=int, default=0)
    parser.add_argument("--progress-thread", action="store_true", help="also at the initiator")
    parser.add_argument("--timeout-seconds", type=float, default=600)
    args = parser.parse_args()
    if args.mode == "initiator" and not args.target_host:
        parser.error("--mode initiator needs --target-host")
    for name in ("block_size", "batch_size", "iters"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def main() -> int:
    args = parse()
    if not SECRET:
        print(
            json.dumps({"event": "unauthenticated", "fix": "set NIXL_BENCHMARK_SECRET at both ends"}),
            flush=True,
        )
    deadline = time.monotonic() + args.timeout_seconds
    try:
        return target(args, deadline) if args.mode == "target" else initiator(args, deadline)
    except TimeoutError:
        sys.exit("timed out")
    except OSError as error:
        sys.exit(f"the connection to the peer broke: {error}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # destructors of a backend whose peer is gone can wait for it for ever
