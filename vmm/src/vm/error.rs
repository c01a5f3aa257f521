//! Reasons why a VM cannot be booted, changed or kept running.

use std::io;

use crate::acpi::memory_hotplug::SLOTS;
use crate::arch::x86_64::layout::MEMORY_BLOCK;
use crate::config::bytes;
use crate::devices::DeviceError;
use crate::error_kind::ErrorKind;
use crate::kvm::KvmError;
use crate::serial::end::ConsoleError;
use crate::tpm::TpmError;
use crate::vcpu::cpu::VcpuError;
use crate::vm::boot;
use crate::vm::memory::MemoryError;

/// Reason why a VM cannot be booted, changed or kept running, in one line.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// The payload cannot be booted.
    #[error(transparent)]
    Boot(#[from] boot::BootError),
    /// KVM is missing or fails.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The guest's memory cannot be allocated or cleared.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The guest has more memory than the CPU can address.
    #[error("--memory size={}: too large for the {bits} address bits of a guest on this CPU; give less", bytes(*.size))]
    AddressBits {
        /// The requested size, in bytes.
        size: u64,
        /// The guest's physical address bits.
        bits: u8,
    },
    /// The host cannot give guests AMX, or no longer can.
    #[error(
        "--cpus features=amx: the host cannot give guests AMX{}; leave it out", 
        .0.as_ref().map_or(String::new(), |error| match error.raw_os_error() {
            Some(libc::EBUSY) => " after this program has run a VM without it".to_string(),
            _ => format!(" ({error})"),
        })
    )]
    Amx(Option<io::Error>),
    /// The host cannot give guests Hyper-V's interface.
    #[error(
        "--cpus kvm_hyperv=on: the KVM of this host has no Hyper-V enlightenments (KVM_CAP_HYPERV_SYNIC); choose a \
         host whose kernel has them (CONFIG_KVM_HYPERV), or boot the guest without"
    )]
    HyperV,
    /// Memory is added in steps only.
    #[error(
        "{} of memory cannot be added: memory is added in steps of {}; ask for {} or {}",
        bytes(*.more), bytes(MEMORY_BLOCK), bytes(*.size + .more / MEMORY_BLOCK * MEMORY_BLOCK),
        bytes(*.size + .more.next_multiple_of(MEMORY_BLOCK))
    )]
    MemoryStep {
        /// Memory of the VM, in bytes.
        size: u64,
        /// Additional memory requested, in bytes.
        more: u64,
    },
    /// Too little room was reserved for memory.
    #[error(
        "{} of memory cannot be added: there is room for {} (--memory hotplug_size=); ask for less, or create the VM \
         with more room",
        bytes(*.more), bytes(*.room)
    )]
    MemoryRoom {
        /// Additional memory requested, in bytes.
        more: u64,
        /// Memory that can be added, in bytes.
        room: u64,
    },
    /// Memory has been added too often.
    #[error("memory can be added {SLOTS} times until the guest restarts; restart it (vm.reboot)")]
    MemorySlots,
    /// Memory is in too many parts.
    #[error("memory has been added too often; shut the VM down and boot it again (vm.shutdown, vm.boot)")]
    MemoryRegions,
    /// A backend that maps guest memory cannot be added to a VM with private memory.
    #[error(
        "{option}: its backend must map the guest's memory, which is private in this VM; boot the VM with --memory \
         shared=on, \
         or with such a backend"
    )]
    PrivateMemory {
        /// The device.
        option: String,
    },
    /// The limit of open files is too low.
    #[error(
        "this VM needs up to {needed} open files, and the limit is {limit}; raise it (ulimit -n {needed}, or \
         LimitNOFILE={needed} in a systemd unit){}",
        or_fewer_vfs(*has_vfs)
    )]
    OpenFiles {
        /// Open files that the VM may need, including those open already.
        needed: u64,
        /// The limit of this process.
        limit: u64,
        /// True if the VM has VFs.
        has_vfs: bool,
    },
    /// The limit of threads is too low.
    #[error(
        "this VM needs up to {needed} threads, and the limit is {limit}; raise it ({raise}){}",
        or_fewer_vfs(*has_vfs)
    )]
    Threads {
        /// Threads that the VM may need.
        needed: u64,
        /// The limit of this process.
        limit: u64,
        /// True if the VM has VFs.
        has_vfs: bool,
        /// Command that raises it.
        raise: &'static str,
    },
    /// The limit of memory mappings is too low.
    #[error(
        "this VM needs up to {needed} memory mappings, and the limit is {limit}; raise it \
         (sysctl vm.max_map_count={needed}){}",
        or_fewer_vfs(*has_vfs)
    )]
    Mappings {
        /// Mappings that the VM may need.
        needed: u64,
        /// The limit of a process.
        limit: u64,
        /// True if the VM has VFs.
        has_vfs: bool,
    },
    /// The number of vCPUs cannot change before the guest has answered an earlier request to remove one.
    #[error(
        "the guest has not answered yet whether it will release vCPU {vcpu}; try again when it has, or restart it \
         (vm.reboot)"
    )]
    VcpuLeaving {
        /// The vCPU.
        vcpu: u8,
    },
    /// The serial port or the virtio console cannot be opened.
    #[error(transparent)]
    Console(#[from] ConsoleError),
    /// A device cannot be opened or placed.
    #[error(transparent)]
    Devices(#[from] DeviceError),
    /// There is no TPM.
    #[error(transparent)]
    Tpm(#[from] TpmError),
    /// A vCPU cannot run.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// The host is out of file descriptors, or a system call failed.
    #[error("cannot {action}: {error}")]
    Host {
        /// Failed action.
        action: &'static str,
        /// Cause.
        error: io::Error,
    },
}

/// The other remedy of a VM that exceeds a limit of the process.
const fn or_fewer_vfs(has_vfs: bool) -> &'static str {
    if has_vfs { ", or reserve fewer VFs" } else { "" }
}

impl VmError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Boot(_) | Self::AddressBits { .. } | Self::PrivateMemory { .. } | Self::MemoryStep { .. } => {
                ErrorKind::Invalid
            }
            Self::MemoryRoom { .. } | Self::MemorySlots | Self::MemoryRegions => ErrorKind::Conflict,
            Self::Devices(error) => error.kind(),
            Self::Tpm(error) => error.kind(),
            Self::VcpuLeaving { .. } => ErrorKind::Busy,
            Self::Kvm(_)
            | Self::Amx(_)
            | Self::HyperV
            | Self::Memory(_)
            | Self::OpenFiles { .. }
            | Self::Threads { .. }
            | Self::Mappings { .. }
            | Self::Console(_)
            | Self::Vcpu(_)
            | Self::Host { .. } => ErrorKind::Host,
        }
    }
}
