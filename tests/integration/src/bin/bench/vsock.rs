//! Connections between a program of the guest and one of the host, over vsock.

use std::path::Path;

use crate::figures::{Bench, Server, Settings, Test};
use crate::{IDLE, boot, on_host};

/// The port of the measurement's server.
const PORT: u16 = 5909;
const TESTS: [Test; 3] = [
    Test { name: "bulk-out", figures: &["bulk out, Mbit/s"] },
    Test { name: "bulk-in", figures: &["bulk in, Mbit/s"] },
    Test { name: "requests", figures: &["request/response a second", "its 99th percentile, us"] },
];

/// Carrier of the connections on the host.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    /// The VMM, to Unix sockets.
    Vmm,
    /// The kernel, to sockets of AF_VSOCK.
    Kernel,
}

/// Measures connections of the guest to the host.
pub(crate) fn measure(what: &str, host: Host, settings: Settings<'_>) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vsock").display().to_string();
    let _server = match host {
        Host::Vmm => Server::start(Path::new(&format!("{socket}_{PORT}"))),
        Host::Kernel => {
            on_host("for module in $CH_LAB/vhost_vsock/*; do insmod $module || exit 1; done");
            Server::start("vsock")
        }
    };
    let mut guest = boot(&["--vsock", &format!("cid=52,socket={socket}")]);
    guest.load("vmw_vsock_virtio_transport");
    guest.wait_for(IDLE);
    let mut bench = Bench { guest: &mut guest, settings };
    bench.measure_by(what, &TESTS, |test| format!("netbench client vsock {test} {}", settings.seconds));
    guest.power_off();
}
