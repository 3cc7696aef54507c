"""The node's gRPC face: proto ↔ model, who may call, and nothing else."""
