"""A DHCP server for one interface: written from RFC 2131, apart from the code under test and its library."""

import ipaddress
import socket
import struct
import threading

_IP = 0x0800
_COOKIE = b"\x63\x82\x53\x63"
_DISCOVER, _OFFER, _REQUEST, _ACK = 1, 2, 3, 5
_OFFERED = ipaddress.ip_address("10.9.0.77").packed
_ANOTHERS = ipaddress.ip_address("10.9.0.66").packed
_SERVER = ipaddress.ip_address("10.9.0.1").packed


class DhcpServer:
    """Offers 10.9.0.77/24 to everybody, with `options` (code to bytes) beside; `asked` is what came."""

    def __init__(self, netns, link, **options):
        self.asked = []
        self._options = {int(code.removeprefix("option")): value for code, value in options.items()}
        self._stopped = threading.Event()
        netns.call(lambda: self._open(link))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

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
            try:
                frame, (_, _, direction, *_) = self._socket.recvfrom(4096)
            except TimeoutError:
                continue
            if direction != socket.PACKET_OUTGOING and frame[23] == socket.IPPROTO_UDP:
                self._answer(frame)

    def _answer(self, frame):
        if struct.unpack_from(">H", frame, 36)[0] != 67:
            return
        message = frame[42:]
        told = dict(_options(message[240:]))
        kind = told[53][0]
        self.asked.append((kind, told))
        answer = {_DISCOVER: _OFFER, _REQUEST: _ACK}[kind]
        known = {
            53: bytes([answer]),
            54: _SERVER,
            51: struct.pack(">I", 3600),
            1: ipaddress.ip_address("255.255.255.0").packed,
        }
        # Somebody else's answer first: only the number of the exchange tells it from ours.
        for number, address in ((b"\0\0\0\7", _ANOTHERS), (message[4:8], _OFFERED)):
            reply = b"\2" + message[1:4] + number + message[8:12] + bytes(4) + address + _SERVER + bytes(4)
            reply += message[28:44] + bytes(192) + _COOKIE + _written({**known, **self._options})
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
    return to + b"\2\0\0\0\0\1" + struct.pack(">H", _IP) + head + udp
