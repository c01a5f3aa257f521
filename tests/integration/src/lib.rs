//! Runs real Linux guests under the real VMM: the harness of the tests in `tests/` and of the demonstration.
//!
//! A test describes a guest ([`GuestSpec`]), boots it ([`Guest`]), runs commands in its shell, and inspects the host's
//! side of its NICs ([`HostTap`]). It uses the VMM's public interface only: the command line, the exit code, the error
//! output, and the guest. Every wait has a time limit, and everything that a test starts ends with it.
//!
//! The tests need root, a KVM that runs stock kernels, and the lab's kernels. `cargo xtask test` provides them.

#![expect(clippy::panic, clippy::unwrap_used, clippy::expect_used, reason = "a test harness fails by panicking")]

mod backends;
mod expected;
mod guest;
mod host;
mod lab;
mod measure;
pub mod migration_wire;
pub mod pattern;
mod peers;
mod repeat;
mod site;
mod traffic;
mod vmm;

pub use backends::{Backend, Backends};
pub use expected::{assert_matches_file, without_what_varies};
pub use guest::client::{Client, Place};
pub use guest::console::Output;
pub use guest::pods::{in_pod, ping_from};
pub use guest::program::ProgramDisk;
pub use guest::silence::record_exits;
pub use guest::sriov::{Pf, Vf, boot_with_vfs, predicted_vf_address, spec_with_vfs, vf_mac, vf_taps};
pub use guest::tenant::{Tenant, reachability};
pub use guest::vfio::GuestTestpmd;
pub use guest::x550::{BRIDGE, ETHTOOL, IP, TC, X550};
pub use guest::{Guest, GuestSpec};
pub use host::bridge::{Bridge, VlanBridge};
pub use host::mode::DeviceMode;
pub use host::nic::{HostNic, loop_device, open_iommufd};
pub use host::systemd::Systemd;
pub use host::tap::{Counters, HostTap, Subnet, interface_exists};
pub use lab::{
    Image, Kernel, Userland, cni_programs, firmware, firmware_disk, guest_tools, hypervisor_fw, initramfs, kernel_file,
    node_programs, read_into_memory, vmm_binary,
};
pub use measure::doorbell_exits::DoorbellExits;
pub use measure::kvm_statistics::KvmExits;
pub use measure::kvm_trace::{KvmEvents, KvmObjects, KvmTrace};
pub use measure::port_trace::PortTrace;
pub use measure::sample::Sample;
pub use measure::usage::{Usage, resident};
pub use peers::storage::StoragePeer;
pub use peers::{Passt, Testpmd};
pub use repeat::{for_each_boot, repetitions};
pub use site::{Plan, Site};
pub use traffic::announcements::Announcements;
pub use traffic::arp_traffic::ArpTraffic;
pub use traffic::flood::Flood;
pub use traffic::hybrid_socket::{call, exchange};
pub use traffic::pings::Pings;
pub use traffic::probes::{Answers, Probes};
pub use traffic::stream::Stream;
pub use traffic::tags::Tags;
pub use traffic::transactions::transactions;
pub use traffic::vm_socket::{VmListener, connect_to_host, end_writing};
pub use vmm::api::{Answer, Api};
pub use vmm::shared_memory::Difference;
pub use vmm::terminal::Terminal;
pub use vmm::{Exit, Vmm, VmmCommand};
