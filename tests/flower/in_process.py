"""Flower's own messages, contexts and client apps without its network: what a test looks at is all in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

Change = Callable[[int, int, Message], Message | None]  # round, number of the client, its reply: what arrives


class InProcess(Grid):
    """Hands every message to a client app, each client with a context that lasts, as a SuperNode does."""

    def __init__(self, app: ClientApp, clients: int, change: Change | None = None) -> None:
        self.app, self.change = app, change
        config = [{"partition-id": i, "num-partitions": clients} for i in range(clients)]
        # Node numbers are large and in no order, as real ones are.
        self.contexts = {
            9_000_000_007 * (clients - i): Context(1, i, config[i], RecordDict(), {}) for i in range(clients)
        }
        self.replies: list[Message] = []

    def node(self, client: int) -> int:
        return list(self.contexts)[client]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        found = []
        for message in messages:
            context = self.contexts[message.metadata.dst_node_id]
            try:
                reply: Message | None = self.app(_copied(message), context)
            except Exception as error:
                reply = Message(Error(1, str(error)), reply_to=message)
            if self.change is not None and reply is not None:
                server_round = message.content["config"]["server-round"]
                reply = self.change(server_round, context.node_config["partition-id"], reply)
            found += [reply] if reply is not None else []
        self.replies += found
        return found

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def run(self) -> Any:
        raise NotImplementedError

    set_run = create_message = push_messages = pull_messages = run


def _copied(message: Message) -> Message:
    """As after a journey: nothing that the client does to its content reaches the server's."""
    content = RecordDict()
    for name, record in message.content.items():
        content[name] = ArrayRecord(dict(record)) if isinstance(record, ArrayRecord) else type(record)(dict(record))
    return Message(content, metadata=message.metadata)


def arrays_of(reply: Message) -> ArrayRecord:
    return next(iter(reply.content.array_records.values()))


def metrics_of(reply: Message) -> MetricRecord:
    return next(iter(reply.content.metric_records.values()))
