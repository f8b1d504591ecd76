"""Object stores on the loopback interface: small launchers, and a proxy that breaks what goes through it.

Each launcher is a context manager that gives an :class:`~tests.servers.endpoint.S3Endpoint` and stops what it started.
"""

from tests.servers.endpoint import S3Endpoint
from tests.servers.faulty_http import Fault, FaultyHTTP, faulty_http
from tests.servers.launchers import ministack_server, moto_server, seaweedfs_server

__all__ = [
    "Fault",
    "FaultyHTTP",
    "S3Endpoint",
    "faulty_http",
    "ministack_server",
    "moto_server",
    "seaweedfs_server",
]
