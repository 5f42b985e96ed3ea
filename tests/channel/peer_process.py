"""A listener in a process of its own, which sends back what it gets. argv: folder with peer.key and ring/."""

import sys
from pathlib import Path

import zmq

from quiesce.channel import KeyPair, KeyRing, Listener, start_authenticator

folder = Path(sys.argv[1])
context = zmq.Context()
authenticator = start_authenticator(context, KeyRing(folder / "ring"))
listener = Listener(context, "tcp://127.0.0.1:*", KeyPair.load(folder / "peer.key"))
print(listener.endpoint, flush=True)
while listener.socket.poll(60_000):
    for received in listener.receive():
        listener.send(received.sender, received.message)
