"""Links over torch.distributed.rpc, for learners and a syncer in processes and on hosts of their own."""

from hf_diloco.links.learner_end import RpcLearnerLink
from hf_diloco.links.syncer_end import RpcSyncerLinks

__all__ = ["RpcLearnerLink", "RpcSyncerLinks"]
