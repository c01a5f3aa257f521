//! Routing IDs, addresses, VF numbers and BAR numbers.

use std::fmt;
use std::str::FromStr;

/// Reason why a number or a text does not name a PCI object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The text is not `SSSS:BB:DD.F`.
    #[error("{0:?} is not a PCI address (SSSS:BB:DD.F, hexadecimal)")]
    Syntax(String),
    /// The device number is above 31.
    #[error("PCI device number {0} is above 31")]
    Device(u8),
    /// The function number is above 7.
    #[error("PCI function number {0} is above 7")]
    Function(u8),
    /// The BAR number is above 5.
    #[error("BAR number {0} is above 5")]
    Bar(u8),
}

/// A routing ID: bus, device and function of one function of a segment (`PCIe 6.2 §2.2.4.2`).
///
/// ```
/// let pf = pci_sriov::Rid::new(0, 3, 0).unwrap();
/// assert_eq!(pf.to_string(), "00:03.0");
/// assert_eq!(pf.wrapping_add(0x100 - 0x18).to_string(), "01:00.0");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rid(u16);

impl Rid {
    /// The function `function` (0 to 7) of device `device` (0 to 31) on `bus`.
    pub const fn new(bus: u8, device: u8, function: u8) -> Result<Self, IdError> {
        if device > 31 {
            return Err(IdError::Device(device));
        }
        if function > 7 {
            return Err(IdError::Function(function));
        }
        Ok(Self::from_bus_devfn(bus, device << 3 | function))
    }

    /// The function whose combined device and function number on `bus` is `devfn`.
    pub const fn from_bus_devfn(bus: u8, devfn: u8) -> Self {
        Self((bus as u16) << 8 | devfn as u16)
    }

    /// The routing ID with this 16-bit value.
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The 16-bit value: bus in bits 15:8, device in 7:3, function in 2:0.
    pub const fn to_bits(self) -> u16 {
        self.0
    }

    /// The bus number.
    pub const fn bus(self) -> u8 {
        self.0.to_be_bytes()[0]
    }

    /// Device and function number as one byte.
    pub const fn devfn(self) -> u8 {
        self.0.to_be_bytes()[1]
    }

    /// The device number, 0 to 31.
    pub const fn device(self) -> u8 {
        self.devfn() >> 3
    }

    /// The function number, 0 to 7.
    pub const fn function(self) -> u8 {
        self.devfn() & 7
    }

    /// The routing ID at the distance `offset`, modulo 2^16, as VF routing IDs are computed (`PCIe 6.2 §9.3.3.9`,
    /// `§9.3.3.10`).
    #[must_use]
    pub const fn wrapping_add(self, offset: u16) -> Self {
        Self(self.0.wrapping_add(offset))
    }

    /// The routing ID at the distance `offset`, or `None` past `FF:1f.7`.
    pub const fn checked_add(self, offset: u16) -> Option<Self> {
        match self.0.checked_add(offset) {
            Some(bits) => Some(Self(bits)),
            None => None,
        }
    }
}

/// As [`fmt::Display`]: `00:03.0`.
impl fmt::Debug for Rid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Rid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}:{:02x}.{}", self.bus(), self.device(), self.function())
    }
}

/// A function's address: segment and routing ID, written `SSSS:BB:DD.F` in hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    /// The segment (domain) number.
    pub segment: u16,
    /// The routing ID within the segment.
    pub rid: Rid,
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{}", self.segment, self.rid)
    }
}

impl FromStr for Bdf {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let syntax = || IdError::Syntax(text.to_string());
        let hex = |part: &str, digits: usize| {
            // from_str_radix alone would take a sign.
            (part.len() == digits && part.bytes().all(|b| b.is_ascii_hexdigit()))
                .then(|| u16::from_str_radix(part, 16).ok())
                .flatten()
                .ok_or_else(syntax)
        };
        let byte = |part: &str, digits: usize| u8::try_from(hex(part, digits)?).map_err(|_| syntax());
        let (segment, rest) = text.split_once(':').ok_or_else(syntax)?;
        let (bus, rest) = rest.split_once(':').ok_or_else(syntax)?;
        let (device, function) = rest.split_once('.').ok_or_else(syntax)?;
        Ok(Self { segment: hex(segment, 4)?, rid: Rid::new(byte(bus, 2)?, byte(device, 2)?, byte(function, 1)?)? })
    }
}

/// The number of a VF of one PF, counted from 0.
///
/// The standard counts VFs from 1; users and Linux (`virtfn0`, `sriov_numvfs`) count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VfIndex(pub u16);

impl fmt::Display for VfIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a base address register, 0 to 5.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BarIndex(u8);

impl BarIndex {
    /// All BARs in order.
    pub const ALL: [Self; 6] = [Self(0), Self(1), Self(2), Self(3), Self(4), Self(5)];

    /// BAR `index`, 0 to 5.
    pub const fn new(index: u8) -> Result<Self, IdError> {
        if index < 6 { Ok(Self(index)) } else { Err(IdError::Bar(index)) }
    }

    /// The number, 0 to 5.
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// `BAR 4`.
impl fmt::Debug for BarIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BAR {}", self.0)
    }
}

impl fmt::Display for BarIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rid_is_bus_device_function() {
        let rid = Rid::new(0xab, 31, 7).unwrap();
        assert_eq!((rid.bus(), rid.device(), rid.function(), rid.devfn()), (0xab, 31, 7, 0xff));
        assert_eq!(rid.to_string(), "ab:1f.7");
        assert_eq!(Rid::new(0, 32, 0), Err(IdError::Device(32)));
        assert_eq!(Rid::new(0, 0, 8), Err(IdError::Function(8)));
    }

    #[test]
    fn a_rid_past_the_last_bus_is_none_or_wraps() {
        let last = Rid::from_bits(0xffff);
        assert_eq!(last.checked_add(1), None);
        assert_eq!(last.wrapping_add(2), Rid::from_bits(1));
    }

    #[test]
    fn a_vf_and_a_bar_are_written_as_their_numbers() {
        assert_eq!(format!("VF {}, BAR {}", VfIndex(256), BarIndex::ALL[4]), "VF 256, BAR 4");
        assert_eq!(BarIndex::new(6).map_err(|error| error.to_string()), Err("BAR number 6 is above 5".to_string()));
    }

    #[test]
    fn debug_output_has_addresses_not_bits() {
        let reach = crate::Reach::Function(Rid::from_bits(0x105));
        assert_eq!(format!("{reach:?} {:?}", (BarIndex::ALL[4], 0)), "Function(01:00.5) (BAR 4, 0)");
    }

    #[test]
    fn an_address_reads_back_what_it_prints() {
        for text in ["0000:00:03.0", "00ff:7f:1f.7"] {
            assert_eq!(text.parse::<Bdf>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_malformed_address_is_refused() {
        for text in [
            "",
            "00:03.0",
            "0000:00:03",
            "0000:00:20.0",
            "0000:00:03.8",
            "+000:00:03.0",
            "0000:00:3.0",
            "0000:0:03.0",
            "é000:00:03.0",
        ] {
            assert!(text.parse::<Bdf>().is_err(), "{text}");
        }
    }
}
