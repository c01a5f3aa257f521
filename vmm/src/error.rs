//! Why a VM cannot run.

use std::io;

use crate::api::SocketError;
use crate::config::ConfigError;
use crate::config_value::bytes;
use crate::event_monitor::MonitorError;
use crate::{boot, console, cpu, devices, kvm, memory};

/// Why a VM cannot run, in one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is one that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Clients cannot be served.
    #[error(transparent)]
    Api(#[from] SocketError),
    /// Events cannot be told.
    #[error(transparent)]
    EventMonitor(#[from] MonitorError),
    /// The payload cannot be booted.
    #[error(transparent)]
    Boot(#[from] boot::Error),
    /// KVM is missing or fails.
    #[error(transparent)]
    Kvm(#[from] kvm::Error),
    /// There is no memory for the guest.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// The guest's memory is more than the CPU can address.
    #[error("--memory size={}: a guest on this CPU has {bits} address bits, too few for so much memory; give less", bytes(*.size))]
    AddressBits {
        /// The size that was asked for, in bytes.
        size: u64,
        /// How many there are.
        bits: u8,
    },
    /// A device was to be added whose backend cannot reach the guest's memory.
    #[error(
        "{option}: its backend has to map the guest's memory, and that of this VM is private; boot the VM with --memory \
         shared=on, or with such a backend"
    )]
    PrivateMemory {
        /// The device.
        option: String,
    },
    /// The process may not have as many files open as the VM may need.
    #[error(
        "this VM needs up to {needed} open files, and the limit is {limit}; raise that (ulimit -n {needed}, or \
         LimitNOFILE={needed} in a systemd unit), or reserve fewer VFs"
    )]
    OpenFiles {
        /// How many it may need, what is open already included.
        needed: u64,
        /// How many it may have.
        limit: u64,
    },
    /// vCPUs were to be added while the guest has not answered whether it lets one go.
    #[error(
        "the guest was asked to let vCPU {vcpu} go, and has not answered yet; try again once it has, ask for fewer vCPUs \
         again, or start it again (vm.reboot)"
    )]
    VcpuLeaving {
        /// The vCPU.
        vcpu: u8,
    },
    /// The serial port cannot be had.
    #[error(transparent)]
    Console(#[from] console::Error),
    /// A device cannot be.
    #[error(transparent)]
    Devices(#[from] devices::Error),
    /// A vCPU cannot run.
    #[error(transparent)]
    Cpu(#[from] cpu::Error),
    /// The host has no file descriptors left, or the like.
    #[error("cannot {action}: {error}")]
    Host {
        /// What was to be done.
        action: &'static str,
        /// Why it was not.
        error: io::Error,
    },
}
