"""What every listening server of this project has: limits, a bound address, health and reflection."""

from __future__ import annotations

from pathlib import Path

import grpc
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.errors import ConfigError

MAX_MESSAGE_BYTES = 8 << 20

# gRPC ignores a misspelt name in silence, so a test compares these with the names its library has.
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would share its connections at random, instead of the second failing.
    ("grpc.so_reuseport", 0),
    # A call may be silent for long: find dead peers by ping, and do not punish peers who do the same.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
]


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind `server` to host:port, [v6]:port or unix:path; returns the address to connect to, with the port chosen for port 0.

    Without `credentials` connections are plain text. Raises ConfigError if the address is taken, or is none.
    """
    host, _, port = address.rpartition(":")
    if not address.startswith("unix:") and (not host or not port.isdecimal() or int(port) > 65535):
        raise ConfigError(f"not an address: {address}; write HOST:PORT or unix:PATH")
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(f"cannot listen on: {address}; the port is in use or not ours to bind, choose another") from None
    return address if address.startswith("unix:") else f"{host}:{bound}"


def add_health(server: grpc.aio.Server, *files: FileDescriptor) -> health.aio.HealthServicer:
    """Add health (nothing set yet) and reflection, which lists the services of `files` and these two."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = [service.full_name for file in files for service in file.services_by_name.values()]
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return servicer


def read_pem(file: Path | None) -> bytes | None:
    """The bytes of a key or certificate, None for None. Raises ConfigError."""
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read: {file}: {error.strerror}; name a PEM file") from None
