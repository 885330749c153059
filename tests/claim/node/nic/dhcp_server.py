"""A DHCP server for one interface: written from RFC 2131, apart from the code under test and its library."""

import ipaddress
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

DISCOVER, OFFER, REQUEST, ACK, NAK, RELEASE = 1, 2, 3, 5, 6, 7
MAC = b"\2\0\0\0\0\1"
_IP = 0x0800
_COOKIE = b"\x63\x82\x53\x63"
_OFFERED = ipaddress.ip_address("10.9.0.77").packed
_ANOTHERS = ipaddress.ip_address("10.9.0.66").packed
_SERVER = ipaddress.ip_address("10.9.0.1").packed


def seconds(count):
    """The value of option 51, 58 or 59."""
    return struct.pack(">I", count)


@dataclass(frozen=True)
class ReceivedMessage:
    """One message of a client."""

    kind: int
    options: dict
    client: str
    """The address that the client claims to have (ciaddr)."""
    hardware: bytes
    sender: str
    to: str
    to_mac: bytes


class DhcpServer:
    """Offers 10.9.0.77/24 to every client, with additional `options` (code to bytes).

    `received` are the messages of clients.
    `answers` are the answers to requests: `ACK`, `NAK`, or None for silence. Frames with the options in
    `before` come ahead of each answer, and of silence.
    """

    def __init__(self, netns, link, before=(), **options):
        self.received = []
        self.answers = ACK
        self.before = before
        self._options = {int(code.removeprefix("option")): value for code, value in options.items()}
        self._stopped = threading.Event()
        netns.call(lambda: self._open(link))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def asked(self):
        """Kinds and options of the received messages."""
        return [(message.kind, message.options) for message in self.received]

    def _open(self, link):
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_IP))
        self._socket.bind((link, _IP))
        self._socket.settimeout(0.1)

    def close(self):
        self._stopped.set()
        self._thread.join()
        self._socket.close()

    def _serve(self):
        while not self._stopped.is_set():
            # The link is down for the moment in which its other end moves.
            with suppress(OSError):
                frame, (_, _, direction, *_) = self._socket.recvfrom(4096)
                if direction != socket.PACKET_OUTGOING and frame[23] == socket.IPPROTO_UDP:
                    self._answer(frame)

    def _answer(self, frame):
        if struct.unpack_from(">H", frame, 36)[0] != 67:
            return
        message = frame[42:]
        reported = dict(_options(message[240:]))
        kind = reported[53][0]
        self.received.append(
            ReceivedMessage(
                kind=kind,
                options=reported,
                client=socket.inet_ntoa(message[12:16]),
                hardware=message[28:34],
                sender=socket.inet_ntoa(frame[26:30]),
                to=socket.inet_ntoa(frame[30:34]),
                to_mac=frame[0:6],
            )
        )
        answers = {DISCOVER: OFFER, REQUEST: self.answers}
        for options in self.before if kind in answers else ():
            self._send(frame, message[4:8], _ANOTHERS, options)
        answer = answers.get(kind)
        if answer is None:
            return
        known = {53: bytes([answer]), 54: _SERVER}
        if answer != NAK:
            known |= {51: seconds(3600), 1: ipaddress.ip_address("255.255.255.0").packed, **self._options}
        # The answer to another client first: only the number of the exchange distinguishes it.
        for number, address in ((b"\0\0\0\7", _ANOTHERS), (message[4:8], _OFFERED)):
            self._send(frame, number, bytes(4) if answer == NAK else address, _written(known))

    def _send(self, frame, number, address, options):
        message = frame[42:]
        reply = b"\2" + message[1:4] + number + message[8:12] + bytes(4) + address + _SERVER + bytes(4)
        reply += message[28:44] + bytes(192) + _COOKIE + options
        self._socket.send(_framed(frame[6:12], reply))


def _options(data):
    while data and data[0] != 255:
        if data[0]:
            yield data[0], data[2 : 2 + data[1]]
            data = data[2 + data[1] :]
        else:
            data = data[1:]


def _written(options):
    return b"".join(bytes([code, len(value)]) + value for code, value in options.items() if value) + b"\xff"


def _framed(to, payload):
    udp = struct.pack(">HHHH", 67, 68, 8 + len(payload), 0) + payload
    head = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, _SERVER, b"\xff" * 4)
    total = sum(struct.unpack(">10H", head))
    total = (total >> 16) + (total & 0xFFFF)
    head = head[:10] + struct.pack(">H", ~(total + (total >> 16)) & 0xFFFF) + head[12:]
    return to + MAC + struct.pack(">H", _IP) + head + udp
