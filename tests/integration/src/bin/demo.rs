//! The demonstration: a guest enables the 8 VFs of its NIC, and each carries traffic over its own backend.
//!
//! `cargo xtask demo` runs it, and provides the kernel and a working KVM. With `--passt` the PF and each VF use a passt
//! instead of a tap, so that no privilege is needed.

use std::env;
use std::time::Instant;

use integration::{Guest, GuestSpec, HostTap, Kernel, Passt, Pf, Subnet, Vf};
use tempfile::TempDir;

const VFS: usize = 8;
const PF: &str = "id=pf0,mac=52:54:00:00:00:01,sriov_vfs=8";
/// Number of bytes that are sent each way through a passt, and compared.
const LEN: usize = 64 << 10;

/// The backends of the PF and its VFs.
enum Backends {
    /// Taps, which the VMM creates.
    Taps,
    /// A passt for each VF, and the last one for the PF. They run as the current user.
    Passts {
        passts: Vec<Passt>,
        // The folder of their sockets, removed on drop.
        _sockets: TempDir,
    },
}

fn main() {
    let by_passt = env::args().any(|argument| argument == "--passt");
    let backends = if by_passt { Backends::passts() } else { Backends::Taps };
    println!(
        "\n$ cloud-hypervisor --kernel vmlinux --initramfs … --cpus boot=1 --memory size=256M {}",
        backends.shown()
    );
    let mut guest = Guest::boot(backends.give(GuestSpec::new(Kernel::V6_12).with_lspci()));
    println!("A Debian guest is up after {:.1} s: Linux {}", guest.boot_time().as_secs_f64(), guest.ok("uname -r"));
    let pf = Pf::find(&mut guest);

    println!("\nguest# echo {VFS} > {}", pf.file("sriov_numvfs"));
    let started = Instant::now();
    pf.set_num_vfs(&mut guest, VFS);
    println!("(done in {:.1} s)", started.elapsed().as_secs_f64());
    println!("\nguest# lspci -tv\n{}", guest.ok("lspci -tv"));

    println!("\n{:4}{:14}{:19}{:11}{:9}traffic", "VF", "address", "MAC", "netdev", "backend");
    let reached = backends.reach_all(&mut guest, &pf);

    println!("\nguest# echo 0 > {}", pf.file("sriov_numvfs"));
    pf.set_num_vfs(&mut guest, 0);
    println!("{} VFs left", pf.vfs(&mut guest).len());
    println!("\nguest# echo {VFS} > {}    # again", pf.file("sriov_numvfs"));
    pf.set_num_vfs(&mut guest, VFS);
    let again = backends.reach_all(&mut guest, &pf);
    guest.assert_kernel_has_no_complaint();

    println!("\nguest# poweroff");
    let exit = guest.power_off();
    println!("The VMM ended with exit code {}", exit.code.map_or("none".into(), |code| code.to_string()));
    println!("\n{reached} of {VFS} VFs reached the host, {again} of {VFS} after they were disabled and enabled again");
    if (reached, again, exit.code) != (VFS, VFS, Some(0)) {
        std::process::exit(1);
    }
}

impl Backends {
    #[expect(clippy::expect_used, reason = "without a folder there is nothing to show")]
    fn passts() -> Backends {
        let sockets = tempfile::tempdir().expect("a folder for sockets can be made");
        let passts = (0..=VFS).map(|index| Passt::start(sockets.path(), Subnet(index as u8), None)).collect();
        Backends::Passts { passts, _sockets: sockets }
    }

    /// The NIC's options, as typed by a user.
    fn shown(&self) -> String {
        match self {
            Backends::Taps => format!("--net {PF},tap=pf0"),
            Backends::Passts { .. } => format!(
                "--net {PF},vhost_user=on,socket=passt{VFS}.sock \
                 --net-vf pf=pf0,index=0,vhost_user=on,socket=passt0.sock …"
            ),
        }
    }

    /// Gives the guest its NIC.
    fn give(&self, spec: GuestSpec) -> GuestSpec {
        match self {
            Backends::Taps => spec.net(&format!("{PF},tap=pf0")),
            Backends::Passts { passts, .. } => {
                let spec = spec.net(&format!("{PF},{}", passts[VFS].net()));
                let vfs = passts[..VFS].iter().enumerate();
                vfs.fold(spec, |spec, (index, passt)| spec.net_vf(&format!("pf=pf0,index={index},{}", passt.net())))
            }
        }
    }

    /// Reaches the host through each VF, which must use only its own backend. Prints a line for each.
    fn reach_all(&self, guest: &mut Guest, pf: &Pf) -> usize {
        let vfs = pf.vfs(guest);
        for vf in &vfs {
            let (backend, traffic) = match self {
                Backends::Taps => ping(guest, vf),
                Backends::Passts { passts, .. } => transfer(guest, vf, &passts[vf.index]),
            };
            let Vf { index, address, mac, .. } = vf;
            println!("{index:<4}{address:14}{mac:19}{:11}{backend:9}{traffic}", vf.interface());
        }
        vfs.len()
    }
}

/// Pings the host. Only the VF's own tap may see the packets. Returns the tap's name and the round-trip time.
fn ping(guest: &mut Guest, vf: &Vf) -> (String, String) {
    let taps: Vec<HostTap> = (0..VFS).map(|index| HostTap::existing(&format!("pf0v{index}"))).collect();
    let subnet = Subnet(vf.index as u8);
    vf.ping_through(guest, &taps, vf.index, subnet);
    let times = guest.ping(vf.interface(), subnet);
    (taps[vf.index].name().to_owned(), format!("ping {}", round_trip(&times)))
}

/// Gets an address by DHCP and transfers data. The host's address belongs to this VF's passt only. Returns the passt's
/// name and a summary.
fn transfer(guest: &mut Guest, vf: &Vf, passt: &Passt) -> (String, String) {
    passt.join_and_transfer(guest, vf.interface(), LEN);
    (format!("passt{}", vf.index), format!("DHCP {}, TCP {} KiB each way", passt.subnet().guest(), LEN >> 10))
}

/// The shortest round trip in the output of `ping`.
fn round_trip(ping: &str) -> String {
    let summary = ping.lines().find(|line| line.starts_with("round-trip"));
    let shortest = summary.and_then(|line| line.split(" = ").nth(1)).and_then(|times| times.split('/').next());
    shortest.map_or_else(|| "?".into(), |time| format!("{time} ms"))
}
