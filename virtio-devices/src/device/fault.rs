//! Faults that the host asks for, for tests of drivers.

/// A fault of one function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The function asks its driver for a reset (`virtio 1.4 §2.1.1`, DEVICE_NEEDS_RESET).
    NeedsReset,
    /// The next interrupts of the function do not arrive.
    LoseInterrupts {
        /// The function, as lines of the log begin.
        name: String,
        /// The MSI-X vector; all if `None`.
        vector: Option<u16>,
        /// Number of interrupts; 0 ends the fault.
        count: u32,
    },
    /// The next writes that would enable the VFs of the PF leave VF Enable clear.
    RefuseVfEnable {
        /// Number of writes; 0 ends the fault.
        count: u32,
    },
    /// The VF disappears, until the VFs are disabled.
    Removal,
}

/// Reason why a function cannot have a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// The VF is not enabled, or was removed.
    #[error("this VF is not enabled; enable it in the guest first")]
    NoVf,
    /// No driver is ready.
    #[error("its driver has not set DRIVER_OK, and only a running device can need a reset; start the driver first")]
    NoDriver,
    /// The function has fewer vectors.
    #[error("vector {vector} does not exist; give one of 0 to {last}")]
    NoVector {
        /// The requested vector.
        vector: u16,
        /// The last vector.
        last: u16,
    },
    /// The backend sends the interrupts.
    #[error("its backend sends the interrupts itself; use a tap without vhost=on, or a switch")]
    Backend,
    /// The function is not a PF.
    #[error("only a PF enables VFs; name a PF, without an index")]
    NotPf,
    /// The device has no such faults.
    #[error("only virtio devices have such faults; name one of them")]
    NotVirtio,
}
