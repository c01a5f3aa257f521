//! Real taps, each test in a network namespace of its own. They need root, `/dev/net/tun` and `ip`; without these they
//! fail and say what is missing.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "what a test needs and lacks fails it")]

#[path = "../src/testing/driver_queue.rs"]
#[allow(dead_code, unreachable_pub, reason = "the crate exports it, and its tests use the rest")]
mod driver;
#[path = "tap/host.rs"]
mod host;
#[path = "../../tests/fixtures/src/namespace.rs"]
mod namespace;
#[path = "../src/net/testing/sample.rs"]
mod sample;

#[path = "tap/down.rs"]
mod down;
#[path = "tap/frames.rs"]
mod frames;
#[path = "tap/lost.rs"]
mod lost;
#[path = "tap/macvtap.rs"]
mod macvtap;
#[path = "tap/open.rs"]
mod open;
#[path = "tap/uplink.rs"]
mod uplink;

// The driver is of the crate, and names its types as there.
use virtio_devices::GuestMap;
