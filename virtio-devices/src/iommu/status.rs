//! Results of a request.

/// The status of a request (`virtio 1.4 §5.13.6`), with its value in the tail of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    /// Success.
    Ok = 0,
    /// Unknown type of request.
    Unsupported = 2,
    /// A function's backend may still reach memory that the request unmapped.
    DeviceError = 3,
    /// Reserved fields or unknown flags are set, or the request conflicts with the present state.
    Invalid = 4,
    /// Addresses or numbers are not aligned or out of range, or a mapping would be split.
    Range = 5,
    /// No such endpoint or domain.
    NoEntry = 6,
    /// The maximum number of mappings is reached.
    NoMemory = 8,
}
