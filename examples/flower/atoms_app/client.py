"""What a client does: own parts from its context, coefficients from the server, train, keep and send."""

from __future__ import annotations

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from sosie.train import Recipe, accuracy, fit
from sosie.train.federated.flower import keep, recall, receive, upload

from .task import client_data, make_model

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    config, client = message.content["config"], context.node_config
    images, labels = client_data(client["partition-id"], client["num-partitions"], "train")
    model = make_model()
    recall(model, context)
    receive(model, message.content["arrays"])
    fit(model, images, labels, recipe=Recipe(epochs=context.run_config.get("epochs", 3)), seed=config["server-round"])
    keep(model, context)
    content = RecordDict(
        {
            "arrays": upload(model, atoms=config["report-atoms"]),
            "metrics": MetricRecord({"num-examples": len(images), "accuracy": accuracy(model, images, labels)}),
        }
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    client = context.node_config
    images, labels = client_data(client["partition-id"], client["num-partitions"], "test")
    model = make_model().eval()
    recall(model, context)
    receive(model, message.content["arrays"])
    metrics = MetricRecord({"num-examples": len(images), "accuracy": accuracy(model, images, labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
