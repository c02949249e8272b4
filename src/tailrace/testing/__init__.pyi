from tailrace.testing.local_broker import LocalBroker as LocalBroker
from tailrace.testing.local_broker import VirtualClock as VirtualClock
from tailrace.testing.local_broker import open_local as open_local
from tailrace.testing.server_process import ServerProcess as ServerProcess

__all__ = ["LocalBroker", "ServerProcess", "VirtualClock", "open_local"]
