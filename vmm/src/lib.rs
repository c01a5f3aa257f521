//! The VMM: configuration, lifecycle, vCPUs and the REST API. Devices come from `virtio-devices`, and KVM, boot
//! protocols and ACPI tables from `machine`, whose modules have their names here, too.
//!
//! The modules of this crate, from the top down. Each may use the modules below it, never those above, which
//! `tests/layering.rs` checks:
//!
//! | module | subject | independent of |
//! |---|---|---|
//! | `control` | the one thread that changes the VM: actions, guest, signals | how devices or vCPUs work |
//! | `error` | [`Error`]: why the program ends, or an action fails | its reporting |
//! | `migration` | live migration of a guest to another process | HTTP |
//! | `snapshot` | saving a guest to files, and restoring it | HTTP |
//! | `vm` | a booted VM: memory, payload, power-on, reset, hot-plug | clients, HTTP, JSON |
//! | `devices` | opening the devices of a plan in their slots | clients; vCPUs |
//! | `machine_state` | the state of a paused machine, as plain data | the VM; its memory |
//! | `firmware` | ports of older PCs, which firmware needs | the VM |
//! | `pci_host` | bus 0: slots, ECAM, MMIO, interrupts, BARs | the configuration |
//! | `vcpu` | vCPU threads and their exits | PCI; devices at addresses |
//! | `api` | HTTP server, requests, actions, documents | the VM; applying actions |
//! | `telemetry` | events and their output | sources of events |
//! | `serial` | the 16550A; the host side of both consoles; the terminal | the VM |
//! | `tpm` | a TPM 2.0, backed by swtpm | the VM |
//! | `landlock` | the files that this process may use | users of files |
//! | `config` | the configuration and its plan | everything that runs |
//! | `vfio` | host devices: their registers, interrupts and memory | the bus; the configuration |
//! | `seccomp` | the system calls that each kind of thread may make | their use |
//! | `privileges` | the capabilities that this process keeps | their use |
//! | `lazy_memory` | the guest's memory in a file, as a whole or page by page | the VM; snapshots |
//! | `dirty` | dirty logs of the guest's memory | copying pages |
//! | `threads` | the one thread that starts all others | their work |
//! | `heap` | memory that the allocator returns to the host | users of memory |

pub mod api;
pub mod config;
mod control;
mod devices;
pub mod dirty;
mod error;
mod firmware;
mod heap;
mod landlock;
mod lazy_memory;
pub mod machine_state;
pub mod migration;
mod pci_host;
mod privileges;
mod seccomp;
pub mod serial;
mod snapshot;
mod telemetry;
mod threads;
mod tpm;
pub mod vcpu;
mod vfio;
pub mod vm;

use machine::{acpi, arch, error_kind, exits, kvm, passed_fd, pci_layout};

pub use crate::landlock::LandlockError;
pub use control::startup::{Options, run};
pub use error::Error;
pub use machine::error_kind::ErrorKind;
pub use migration::error::MigrationError;
pub use seccomp::{Allowance, Seccomp, allowances, call_name};
pub use snapshot::error::SnapshotError;
pub use telemetry::log_output::LogOutput;
pub use telemetry::monitor::{EventMonitor, MonitorError};
pub use virtio_devices::why_no_file;
pub use vm::VmError;

/// Parts of the modules, for fuzz targets.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use pci::{ConfigTarget, Topology};

    use crate::pci_host::{assign_bars, config_pages};

    pub use crate::api::steps::converse;
    pub use crate::pci_host::assign_bars::NoRoom;
    pub use crate::pci_host::config_pages::Shown;
    pub use crate::pci_host::mmio::MmioMap;
    pub use crate::pci_host::recording_vm::{Record, RecordingVm, Refuse};
    pub use crate::pci_host::slot::{PciHost, Slot};
    pub use crate::pci_host::wiring::Wiring;
    pub use crate::pci_layout::Apertures;
    pub use crate::serial::steps::SerialSteps;
    pub use crate::snapshot::image_steps::{ImageSteps, StateSteps};

    /// The size of a page of configuration space, in bytes.
    pub const PAGE: u64 = config_pages::PAGE;

    /// Places the BARs and VF BARs of all devices of `topology` in `free`, as firmware would.
    ///
    /// # Errors
    ///
    /// Fails if there is not enough space.
    pub fn place_bars<D: ConfigTarget>(topology: &Topology<D>, free: Apertures) -> Result<(), NoRoom> {
        assign_bars::place_bars(topology, 0, free)
    }
}
