"""Transports that carry a ``WireStream`` into other processes.

The receivers pull. The kinds differ in the way that bytes travel:

``ipc``: CUDA IPC, on one host. ``shm``: shared memory, on one host, on the CPU. ``collective``:
broadcasts over NCCL (on CUDA, a GPU for each process) or gloo (on the CPU), on any hosts.

The engine's side::

    sender = Sender(kind="ipc", receivers=2)
    # tell the receivers sender.address, then:
    delivery = sender.send_weights(stream)

Each receiver, for each sync::

    with receive_weights(address, rank=1, device=device) as stream:
        receiver.sync(stream, phases)
        stream.answer = receiver.served().tolist(), stream.seconds()

Whatever fails on either side is an error on all of them within the timeout. Connections are
authenticated with a secret (see ``channel``). Messages are data (``engine_api.codec``); a process
that knows the secret decides which weights are served.
"""
