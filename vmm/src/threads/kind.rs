//! What a thread of the program does.

use virtio_devices::WorkerKind;

/// The kinds of threads. Those of a kind may ask the same of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ThreadKind {
    /// Starts all others.
    Starter,
    /// Runs a vCPU and handles its exits.
    Vcpu,
    /// Waits for clients of the API.
    HttpServer,
    /// Reads, performs and answers requests.
    Http,
    /// Writes events.
    EventMonitor,
    /// Reads the serial port's input.
    Serial,
    /// Keeps a debug console's pseudo-terminal.
    DebugConsole,
    /// Carries the guest's TPM commands.
    Tpm,
    /// Works for a device.
    Worker(WorkerKind),
}

impl ThreadKind {
    /// The name of a thread of this kind, which has a number or a device's name after it if there may be several.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Starter => "starter",
            Self::Vcpu => "vcpu",
            Self::HttpServer => "http-server",
            Self::Http => "http-",
            Self::EventMonitor => "event-monitor",
            Self::Serial => "serial",
            Self::DebugConsole => "debug-console",
            Self::Tpm => "tpm",
            Self::Worker(_) => "",
        }
    }
}
