//! Runs real Linux guests under the real VMM: the harness of the tests in `tests/` and of the demonstration.
//!
//! A test describes a guest ([`GuestSpec`]), boots it ([`Guest`]), runs commands in its shell, and inspects the host's
//! side of its NICs ([`HostTap`]). It uses the VMM's public interface only: the command line, the exit code, the error
//! output, and the guest. Every wait has a time limit, and everything that a test starts ends with it.
//!
//! The tests need root, a KVM that runs stock kernels, and the lab's kernels. `cargo xtask test` provides them.

#![expect(clippy::panic, clippy::unwrap_used, clippy::expect_used, reason = "a test harness fails by panicking")]

mod announcements;
mod api;
mod arp_traffic;
mod backends;
mod bridge;
mod client;
mod console;
mod doorbell_exits;
mod expected;
mod flood;
mod guest;
mod guest_vfio;
mod host_nic;
mod hybrid_socket;
mod hypervisor_fw;
mod kernel_fs;
mod kexec;
mod kvm_statistics;
mod kvm_trace;
mod lab;
pub mod migration_wire;
mod mode;
pub mod pattern;
mod peers;
mod pings;
mod port_trace;
mod probes;
mod program;
mod repeat;
mod sample;
mod shared_memory;
mod silence;
mod site;
mod sriov;
mod storage_peers;
mod stream;
mod systemd;
mod tap;
mod tenant;
mod terminal;
mod transactions;
mod transfer;
mod usage;
mod vm_socket;
mod vmm;

pub use announcements::Announcements;
pub use api::{Answer, Api};
pub use arp_traffic::ArpTraffic;
pub use backends::{Backend, Backends};
pub use bridge::{Bridge, VlanBridge};
pub use client::{Client, Place};
pub use console::Output;
pub use doorbell_exits::DoorbellExits;
pub use expected::{assert_matches_file, without_what_varies};
pub use flood::Flood;
pub use guest::{Guest, GuestSpec};
pub use guest_vfio::GuestTestpmd;
pub use host_nic::{HostNic, loop_device, open_iommufd};
pub use hybrid_socket::{call, exchange};
pub use kvm_statistics::KvmExits;
pub use kvm_trace::{KvmEvents, KvmObjects, KvmTrace};
pub use lab::{
    Image, Kernel, Userland, firmware, firmware_disk, hypervisor_fw, initramfs, kernel_file, read_into_memory,
    vmm_binary,
};
pub use mode::DeviceMode;
pub use peers::{Passt, Testpmd};
pub use pings::Pings;
pub use port_trace::PortTrace;
pub use probes::{Answers, Probes};
pub use program::ProgramDisk;
pub use repeat::{for_each_boot, repetitions};
pub use sample::Sample;
pub use shared_memory::Difference;
pub use silence::record_exits;
pub use site::{Plan, Site};
pub use sriov::{Pf, Vf, boot_with_vfs, predicted_vf_address, spec_with_vfs, vf_mac, vf_taps};
pub use storage_peers::StoragePeer;
pub use stream::Stream;
pub use systemd::Systemd;
pub use tap::{Counters, HostTap, Subnet, interface_exists};
pub use tenant::{Tenant, reachability};
pub use terminal::Terminal;
pub use transactions::transactions;
pub use usage::{Usage, resident};
pub use vm_socket::{VmListener, connect_to_host, end_writing};
pub use vmm::{Exit, Vmm, VmmCommand};
