//! Measures throughput and latency between a guest and its host: of a container, by kind of backend or of network, of
//! connections over vsock, and of a shared folder; and between two containers of a guest. Also the time to save and
//! restore a guest, and its downtime when it moves to another VMM.
//!
//! Run by `cargo xtask bench` in a first-level machine whose clock counts instructions. Its figures do not depend on
//! other machines or load. Everything shares one processor, so a better figure means fewer instructions. Arguments: the
//! kind of backend, `containers`, `switch`, `x550`, `x550-jumbo`, `x550-vfs`, `bridge`, `bridge-vhost`, `iommu`,
//! `iommu-vhost`, `iommu-intel`, `vsock`, `vhost-vsock`, `virtio-fs`, `snapshot`, `migration` or `vfio`; the seconds
//! per test; the number of runs; and optionally the only test to run.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed measurement panics and says where")]

mod container;
mod figures;
mod files;
mod iommu;
mod migration;
mod neighbours;
mod networks;
mod snapshot;
mod vfio;
mod vfs;
mod vsock;

use std::env;
use std::process::Command;
use std::thread;
use std::time::Duration;

use integration::{Backend, Backends, Guest, GuestSpec, HostTap, Kernel, Pf, Subnet};

use container::Container;
use figures::{Bench, Server, Settings};
use vsock::Host;

/// Interval at which an idle thread wakes up. With a clock that counts instructions, an emulated machine without
/// pending timers has been seen to hang.
const TICK: Duration = Duration::from_millis(50);
/// Succeeds if the guest has been idle for half a second. After a boot, its kernel is busy for some seconds.
const IDLE: &str = "idle() { read -r cpu user nice system idle rest < /proc/stat; }; \
                    idle; before=$idle; sleep 0.5; idle; [ $((idle - before)) -ge 40 ]";
/// The VF over a tap whose frames are checked and tagged, and its policy.
const POLICY: (&str, &str) = ("tap-policy", "spoofchk=on,trust=off,vlan=100");
/// The host's end of the VLAN.
const VLAN: &str = "bench0";
/// The network of the VF.
const SUBNET: Subnet = Subnet(0);

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [what, seconds, runs, only @ ..] = arguments.as_slice() else {
        panic!(
            "usage: bench BACKEND|containers|switch|x550|x550-jumbo|x550-vfs|bridge|bridge-vhost|iommu|iommu-vhost|\
             iommu-intel|vsock|vhost-vsock|virtio-fs|snapshot|migration|vfio SECONDS RUNS [TEST]"
        )
    };
    let only = only.first().map(String::as_str).filter(|only| *only != "all");
    thread::spawn(|| {
        loop {
            thread::sleep(TICK);
        }
    });
    let (seconds, runs) = (seconds.parse().unwrap(), runs.parse().unwrap());
    let settings = Settings { seconds, runs, only };
    match what.as_str() {
        "vsock" => vsock::measure(what, Host::Vmm, settings),
        "vhost-vsock" => vsock::measure(what, Host::Kernel, settings),
        "virtio-fs" => files::measure(what, settings),
        "snapshot" => snapshot::measure(settings),
        "migration" => migration::measure(settings),
        "vfio" => vfio::measure(what, settings.runs),
        "x550-vfs" => vfs::measure(what, settings.runs),
        _ => match (neighbours::By::named(what), iommu::Machine::named(what)) {
            (Some(by), _) => neighbours::measure(what, by, settings),
            (_, Some(machine)) => iommu::measure(what, machine, settings),
            _ => measure_networks(what, settings),
        },
    }
}

/// A guest with the options `arguments` and the test modules.
fn boot(arguments: &[&str]) -> Guest {
    let spec = GuestSpec::new(Kernel::V6_12).with_modules().kernel_argument("tsc=reliable");
    Guest::boot(spec.arguments(arguments))
}

/// Measures the container of a VF with the backend `what`, or containers with several networks.
fn measure_networks(what: &str, settings: Settings<'_>) {
    let backends = Backends::start(&[backend(what)]);
    let spec = if what == POLICY.0 {
        GuestSpec::new(Kernel::V6_12).net("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=1").net_vf(&format!(
            "{},{}",
            backends.vf(0),
            POLICY.1
        ))
    } else {
        backends.spec(Kernel::V6_12)
    };
    let mut guest = Guest::boot(spec.kernel_argument("tsc=reliable"));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 1);
    guest.wait_for(IDLE);
    let _server = Server::start("0.0.0.0");
    let interface = pf.vfs(&mut guest)[0].interface().to_owned();
    if what == POLICY.0 {
        on_host(&format!("ip link add link {} name {VLAN} type vlan id 100", backends.taps()[0].name()));
        HostTap::existing(VLAN).join(SUBNET);
    } else {
        backends.taps()[0].join(SUBNET);
    }
    let container = Container::new(&mut guest, "vf", SUBNET.host());
    container.give(&mut guest, &interface, &format!("{}/24", SUBNET.guest()));
    let mut bench = Bench { guest: &mut guest, settings };
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
        _ if name == POLICY.0 => Backend::Tap,
        "vhost-net" => Backend::VhostNet,
        "vhost-user" => Backend::VhostUser,
        "vdpa" => Backend::Vdpa,
        _ => panic!("{name}: no such kind of backend"),
    }
}

/// Runs a shell command in the first-level machine.
fn on_host(command: &str) {
    let status = Command::new("sh").arg("-c").arg(command).status().unwrap();
    assert!(status.success(), "{command}: {status}");
}
