"""Errors on the wire: gRPC statuses, with google.rpc details, and back."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.errors import InvalidRequestError, SpecdecError
from specdec.rpc.convert import api_field

ERROR_DOMAIN = "specdec"
_MAX_TEXT_BYTES = 800
"""Of an error: a status travels in the trailers, of which gRPC clients take 8 KB, and messages may
quote what the caller sent."""


class ServerError(SpecdecError):
    """A call failed for a reason that is not the request's.

    code: the gRPC status.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineUnavailableError(SpecdecError):
    """The engine takes no requests: it is loading, stopping, or has stopped.

    reason: a word for machines, upper case.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RequestFailedError(SpecdecError):
    """A step failed for this request; others may go on."""


def status_of(error: Exception) -> status_pb2.Status:
    """The gRPC status that reports an error to a client.

    An InvalidRequestError carries its field as a BadRequest violation. Errors that nobody meant to
    raise are INTERNAL and named by their type only: their text may quote another request.
    """
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_shortened(error.message)
        )
        detail = error_details_pb2.BadRequest(field_violations=[violation])
        return _status(code_pb2.INVALID_ARGUMENT, str(error), detail)
    if isinstance(error, EngineUnavailableError):
        info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
        return _status(code_pb2.UNAVAILABLE, str(error), info)
    if isinstance(error, SpecdecError):
        return _status(code_pb2.INTERNAL, str(error))
    return _status(code_pb2.INTERNAL, f"{type(error).__name__} while serving the request")


def _status(
    code: int,
    message: str,
    detail: error_details_pb2.BadRequest | error_details_pb2.ErrorInfo | None = None,
) -> status_pb2.Status:
    details = []
    if detail is not None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        details.append(packed)
    return status_pb2.Status(code=code, message=_shortened(message), details=details)


def _shortened(text: str) -> str:
    encoded = text.encode(errors="replace")
    shortened = encoded[:_MAX_TEXT_BYTES].decode(errors="ignore")
    return shortened if len(encoded) <= _MAX_TEXT_BYTES else f"{shortened} ..."


def error_of(call: grpc.RpcError, address: str) -> SpecdecError:
    """The error that a failed call stands for, as the Python API would have raised it.

    address: what was called.
    """
    status = rpc_status.from_call(call)
    for packed in status.details if status is not None else ():
        bad_request = error_details_pb2.BadRequest()
        if packed.Unpack(bad_request) and bad_request.field_violations:
            violation = bad_request.field_violations[0]
            return InvalidRequestError(api_field(violation.field), violation.description)
    code = call.code()
    message = call.details() or "no details"
    if code is grpc.StatusCode.UNAVAILABLE:
        message = f"no answer from a server at {address}: {message}"
    return ServerError(code, f"{message} ({code.name})")
