//! Kinds of the program's threads.

use virtio_devices::WorkerKind;

/// Kind of a thread. Threads of a kind share a system call filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ThreadKind {
    /// Creates and changes the VM. The first thread of the process.
    Main,
    /// Starts all other threads.
    Starter,
    /// Opens resources of an action, such as vhost-user backends.
    Open,
    /// Writes a snapshot.
    Snapshot,
    /// Fills the memory of a restored guest.
    PageFaults,
    /// Takes part in a migration: decisions, peer connection, or pages.
    Migration,
    /// Runs a vCPU and handles its exits.
    Vcpu,
    /// Accepts clients of the API.
    HttpServer,
    /// Serves requests.
    Http,
    /// Writes events.
    EventMonitor,
    /// Reads the serial port's input.
    Serial,
    /// Services a debug console's pseudo-terminal.
    DebugConsole,
    /// Forwards the guest's TPM commands.
    Tpm,
    /// Serves a device.
    Worker(WorkerKind),
}

impl ThreadKind {
    /// Returns the kinds that the starter starts, vCPUs first.
    pub(crate) fn started() -> impl Iterator<Item = Self> {
        use ThreadKind::{
            DebugConsole, EventMonitor, Http, HttpServer, Migration, Open, PageFaults, Serial, Snapshot, Tpm, Vcpu,
        };
        let others =
            [Vcpu, HttpServer, Http, EventMonitor, Serial, DebugConsole, Tpm, Open, Snapshot, PageFaults, Migration];
        others.into_iter().chain(WorkerKind::ALL.map(Self::Worker))
    }

    /// Name of a thread of this kind; a number or a device's name follows if there can be several.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            // The program's name.
            Self::Main | Self::Worker(_) => "",
            Self::Starter => "starter",
            Self::Open => "open",
            Self::Snapshot => "snapshot",
            Self::PageFaults => "page-faults",
            Self::Migration => "migration",
            Self::Vcpu => "vcpu",
            Self::HttpServer => "http-server",
            Self::Http => "http-",
            Self::EventMonitor => "event-monitor",
            Self::Serial => "serial",
            Self::DebugConsole => "debug-console",
            Self::Tpm => "tpm",
        }
    }
}
