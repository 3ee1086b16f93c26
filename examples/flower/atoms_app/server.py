"""What the server does: average the coefficients, and see from their atoms which clients are alike."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from sosie.train.federated.flower import AtomStrategy, upload

from .task import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    rounds, clients = context.run_config.get("rounds", 2), context.run_config.get("clients", 6)
    strategy = AtomStrategy(report_atoms=True, min_train_nodes=clients, min_available_nodes=clients)
    result = strategy.start(grid, upload(make_model()), num_rounds=rounds)
    for number, done in strategy.rounds.items():
        print(f"round {number}: {len(done.examples)} clients, dropped {done.dropped or 'none'}")
        if done.atoms is not None:
            print("1 − cosine of the atoms, in 10⁻⁴")
            print((1e4 * (1 - done.atoms.cosines())).numpy().round(2))
            print("clusters", done.clusters(context.run_config.get("clusters", 2)))
    print("accuracy on own test images", dict(result.evaluate_metrics_clientapp[rounds]))
