"""Plain PyTorch: one process holds the whole model and publishes it after every optimizer step.

python examples/trainers/plain_pytorch.py MODEL_PATH
"""

import ray
import torch


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Trainer:
    """The process whose weights the engines read; the driver calls one method at a time."""

    def __init__(self, model_path, fleet):
        from transformers import AutoModelForCausalLM

        from sglang.srt.ray import HttpEngineControl, WeightPublisher

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        engines = [HttpEngineControl(url, actors) for url, actors in fleet]
        self.publisher = WeightPublisher.connect(engines)

    def step(self, tokens, version):
        """One step on `tokens` (batch, length), then every engine serves its result as `version`."""
        tokens = torch.as_tensor(tokens)
        self.optimizer.zero_grad()
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        return self.publisher.sync(self.model.state_dict(), version=version)

    def state(self):
        return self.model.state_dict()

    def close(self):
        self.publisher.close()


def main(model_path):
    from local_engine import local_engine

    with local_engine(model_path) as (url, actors):
        trainer = Trainer.remote(model_path, [(url, actors)])
        for step in range(1, 4):
            report = ray.get(trainer.step.remote([[5, 6, 7, 8]], str(step)), timeout=300)
            print(
                f"version {report.version}: {report.total_bytes:,} bytes in {report.total_seconds:.3f} s"
            )
        ray.get(trainer.close.remote(), timeout=60)


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
