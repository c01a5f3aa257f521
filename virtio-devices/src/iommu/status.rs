//! Results of a request.

/// The status of a request (`virtio 1.4 §5.13.6`), as its value in the last part of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    /// It is carried out.
    Ok = 0,
    /// There is no such kind of request.
    Unsupported = 2,
    /// A function's backend may still reach what the request took away.
    DeviceError = 3,
    /// Reserved fields or unknown flags are set, or what is asked for contradicts what there is.
    Invalid = 4,
    /// Addresses or numbers are not aligned or out of range, or a mapping would be split.
    Range = 5,
    /// There is no such endpoint or domain.
    NoEntry = 6,
    /// There are as many mappings as there can be.
    NoMemory = 8,
}
