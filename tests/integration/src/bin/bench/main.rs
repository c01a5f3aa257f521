//! Measures throughput and latency between a guest's container and the host, by kind of backend or of network.
//!
//! Run by `cargo xtask bench` in a first-level machine whose clock counts instructions. Its figures depend on no
//! other machine and no load, and since everything shares one processor, a better figure means fewer instructions.
//! Arguments: the kind of backend, or `containers`; the seconds per test; the number of runs; and optionally the only
//! test to run.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed measurement panics and says where")]

mod container;
mod figures;
mod networks;

use std::env;
use std::thread;
use std::time::Duration;

use integration::{Backend, Backends, Guest, Kernel, Pf, Subnet};

use container::Container;
use figures::{Bench, Server};

/// How often a thread wakes up that does nothing else. With a clock that counts instructions, an emulated machine
/// without any pending timer has been seen to stand still.
const TICK: Duration = Duration::from_millis(50);
/// Succeeds if the guest has been idle for half a second. After a boot, its kernel is busy for some seconds.
const IDLE: &str = "idle() { read -r cpu user nice system idle rest < /proc/stat; }; \
                    idle; before=$idle; sleep 0.5; idle; [ $((idle - before)) -ge 40 ]";
/// The network of the VF.
const SUBNET: Subnet = Subnet(0);

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [what, seconds, runs, only @ ..] = arguments.as_slice() else {
        panic!("usage: bench BACKEND|containers SECONDS RUNS [TEST]")
    };
    let only = only.first().map(String::as_str);
    thread::spawn(|| {
        loop {
            thread::sleep(TICK);
        }
    });
    let backends = Backends::start(&[backend(what)]);
    let mut guest = Guest::boot(backends.spec(Kernel::V6_12).kernel_argument("tsc=reliable"));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 1);
    guest.wait_for(IDLE);
    let _server = Server::start();
    let interface = pf.vfs(&mut guest)[0].interface().to_owned();
    backends.taps()[0].join(SUBNET);
    let container = Container::new(&mut guest, "vf", SUBNET.host());
    container.give(&mut guest, &interface, &format!("{}/24", SUBNET.guest()));
    let mut bench = Bench { guest: &mut guest, seconds: seconds.parse().unwrap(), runs: runs.parse().unwrap(), only };
    if what == "containers" {
        bench.measure("a VF", &container);
        networks::measure(&mut bench, &pf);
    } else {
        bench.measure(what, &container);
    }
    guest.power_off();
}

fn backend(name: &str) -> Backend {
    match name {
        "tap" | "containers" => Backend::Tap,
        "vhost-net" => Backend::VhostNet,
        "vhost-user" => Backend::VhostUser,
        "vdpa" => Backend::Vdpa,
        _ => panic!("{name}: no such kind of backend"),
    }
}
