"""What can go wrong, as types.

DiLoCoError
├── ConfigError                 a setting is wrong (also a ValueError)
├── NoTrainableParametersError  the model has nothing to train (also a ValueError)
├── UnsupportedError            this platform, model wrapper or torch release cannot be served
├── JoinError                   this learner could not become part of the run
│   ├── SyncerUnreachableError  nobody answers at the syncer's address (also a ConnectionError)
│   ├── AuthenticationError     the token is wrong (also a PermissionError)
│   └── LearnerRefusedError     the syncer refused: other layout, base model, total steps, id in use, ...
└── MessageError                bytes from a peer do not form a valid message

DiLoCoWarning                   something is probably not what you meant (a UserWarning)
"""

from __future__ import annotations


class DiLoCoError(Exception):
    """Base class of every error that hf-diloco raises on purpose."""


class ConfigError(DiLoCoError, ValueError):
    """A setting is out of range or contradicts another one."""


class NoTrainableParametersError(DiLoCoError, ValueError):
    """The model has no parameter with ``requires_grad=True``."""


class UnsupportedError(DiLoCoError):
    """This platform, model wrapper or torch release cannot be served; the message says what can."""


class JoinError(DiLoCoError):
    """This learner could not become part of the run."""


class SyncerUnreachableError(JoinError, ConnectionError):
    """Nobody answered at the syncer's address for as long as we tried."""


class AuthenticationError(JoinError, PermissionError):
    """The token of this learner is not the token of the run, or the answer did not come from its syncer."""


class LearnerRefusedError(JoinError):
    """The syncer refused this learner; the message names the first difference and the remedy."""


class MessageError(DiLoCoError):
    """Bytes from a peer do not form a valid message."""


class DiLoCoWarning(UserWarning):
    """Something is probably not what the user meant."""
