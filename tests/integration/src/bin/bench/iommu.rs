//! A VF behind the guest's IOMMU in each of its modes, and one in a guest without an IOMMU.

use integration::{Api, Backend, Backends, Guest, GuestSpec, HostTap, Kernel, Pf, Subnet};

use crate::IDLE;
use crate::container::Container;
use crate::figures::{Bench, Server, Settings};

/// The network of the VF.
const SUBNET: Subnet = Subnet(0);
/// Modes of a guest's IOMMU: the name, and the argument of the guest's kernel.
const MODES: [(&str, &str); 3] =
    [("passthrough", "iommu.passthrough=1"), ("lazy", "iommu.strict=0"), ("strict", "iommu.strict=1")];

/// An IOMMU, and the backend behind it.
#[derive(Clone, Copy)]
pub(crate) struct Machine {
    backend: Backend,
    /// The value of `--platform`.
    iommu: &'static str,
    /// Argument for its driver.
    argument: &'static str,
}

impl Machine {
    /// The machine with the name `name` in `cargo xtask bench`.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let machine = |backend, iommu, argument| Some(Self { backend, iommu, argument });
        match name {
            "iommu" => machine(Backend::Tap, "iommu=on", ""),
            "iommu-vhost" => machine(Backend::VhostNet, "iommu=on", ""),
            // Only in QEMU.
            "iommu-intel" => machine(Backend::Tap, "iommu=intel", "intel_iommu=on"),
            _ => None,
        }
    }
}

/// Measures a VF without an IOMMU and one in each mode, in a guest each.
pub(crate) fn measure(what: &str, machine: Machine, settings: Settings<'_>) {
    measure_guest(&format!("{what}: none"), machine, None, settings);
    for (mode, argument) in MODES {
        measure_guest(&format!("{what}: {mode}"), machine, Some(argument), settings);
    }
}

fn measure_guest(what: &str, machine: Machine, mode: Option<&str>, settings: Settings<'_>) {
    let backends = Backends::start(&[machine.backend]);
    let api = Api::new("iommu");
    let spec = backends.spec(Kernel::V6_12).with_modules().kernel_argument("tsc=reliable");
    let spec = mode.into_iter().fold(spec, |spec, mode| behind(spec, machine, mode, &api));
    let mut guest = Guest::boot(spec);
    if mode.is_some() {
        guest.load("virtio_iommu");
    }
    let pf = Pf::find(&mut guest);
    // Behind QEMU's IOMMU it waits for the driver of the IOMMU.
    guest.wait_for(&format!("[ -e {} ]", pf.file("driver")));
    pf.set_num_vfs(&mut guest, 1);
    guest.wait_for(IDLE);
    let _server = Server::start("0.0.0.0");
    let tap: &HostTap = &backends.taps()[0];
    tap.join(SUBNET);
    let interface = pf.vfs(&mut guest)[0].interface().to_owned();
    let container = Container::new(&mut guest, "vf", SUBNET.host());
    container.give(&mut guest, &interface, &format!("{}/24", SUBNET.guest()));
    // The first exchange needs ARP.
    guest.wait_for(&container.inside(&format!("ping -c 1 -W 1 {}", SUBNET.host())));
    let before = mode.and_then(|_| maps(&api));
    Bench { guest: &mut guest, settings }.measure(what, &container);
    if let (Some(before), Some(after)) = (before, mode.and_then(|_| maps(&api))) {
        let seconds = settings.seconds * settings.runs as f64;
        println!("| {what} | mappings a second, all tests | {:.0} | | |", (after - before) as f64 / seconds);
    }
    if mode.is_some() {
        // Linux turns off its IOMMU with requests that it has not sent yet, and then spins for the replies. In lazy
        // mode it sends them 10 ms after the last buffer was unmapped.
        guest.ok("usleep 50000");
    }
    guest.power_off();
}

fn behind(spec: GuestSpec, machine: Machine, mode: &str, api: &Api) -> GuestSpec {
    let spec = spec.arguments(&["--platform", machine.iommu, "--api-socket", &api.argument()]);
    [mode, machine.argument].into_iter().filter(|word| !word.is_empty()).fold(spec, GuestSpec::kernel_argument)
}

/// Number of mappings that the guest's driver has requested. Only the VMM of this project reports it.
fn maps(api: &Api) -> Option<u64> {
    std::env::var_os("CH_QEMU").is_none().then(|| api.get("vm.counters").body["__iommu"]["maps"].as_u64())?
}
