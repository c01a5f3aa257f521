//! Kernel structures with a stable layout, as short text.

use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Limit on a blob's length in bytes. The largest structure is a vCPU's XSAVE area, of which AMX takes 11 KiB.
pub const MAX_LEN: usize = 64 << 10;
/// Unit in which zeros are left out, in bytes.
const PART: usize = 16;

/// Mostly zero bytes.
///
/// As text: the length in bytes, then each run of nonzero parts: offset, colon, hexadecimal bytes.
/// `32 16:00ff0000000000000000000000000000` is 32 bytes, of which byte 17 is 255.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Blob(Vec<u8>);

impl Blob {
    /// Creates a blob of at most [`MAX_LEN`] bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        debug_assert!(bytes.len() <= MAX_LEN);
        Self(bytes)
    }

    /// Creates a blob of a structure's bytes.
    pub fn of<T: IntoBytes + Immutable>(structure: &T) -> Self {
        Self::new(structure.as_bytes().to_vec())
    }

    /// Returns the structure with these bytes; `None` if the length differs.
    pub fn read<T: FromBytes>(&self) -> Option<T> {
        T::read_from_bytes(&self.0).ok()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.len())?;
        let mut follows = false;
        for (offset, part) in (0..).step_by(PART).zip(self.0.chunks(PART)) {
            let is_zero = part.iter().all(|byte| *byte == 0);
            if !is_zero && !follows {
                write!(f, " {offset}:")?;
            }
            if !is_zero {
                part.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
            }
            follows = !is_zero;
        }
        Ok(())
    }
}

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blob({self})")
    }
}

/// Malformed text of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a length in bytes, followed by offsets and bytes in hexadecimal")]
pub struct NoBlob;

impl FromStr for Blob {
    type Err = NoBlob;

    fn from_str(text: &str) -> Result<Self, NoBlob> {
        let mut words = text.split(' ');
        let len: usize = words.next().and_then(|len| len.parse().ok()).ok_or(NoBlob)?;
        if len > MAX_LEN {
            return Err(NoBlob);
        }
        let mut bytes = vec![0; len];
        for word in words {
            let (offset, digits) = word.split_once(':').ok_or(NoBlob)?;
            let offset: usize = offset.parse().map_err(|_| NoBlob)?;
            let digits = digits.as_bytes();
            let end = offset.checked_add(digits.len() / 2).filter(|_| digits.len().is_multiple_of(2));
            let run = end.and_then(|end| bytes.get_mut(offset..end)).ok_or(NoBlob)?;
            for (byte, digits) in run.iter_mut().zip(digits.chunks_exact(2)) {
                *byte = digits.iter().try_fold(0, |byte, digit| Ok(byte << 4 | value(*digit)?))?;
            }
        }
        let blob = Self(bytes);
        // Each blob has a single text, so that saving a restored machine gives the same bytes.
        if blob.to_string() == text { Ok(blob) } else { Err(NoBlob) }
    }
}

fn value(digit: u8) -> Result<u8, NoBlob> {
    match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(NoBlob),
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn zeros_take_no_room() {
        let mut bytes = vec![0; 40];
        bytes[17] = 255;
        bytes[39] = 1;
        assert_eq!(Blob::new(bytes).to_string(), format!("40 16:00ff{}01", "00".repeat(21)));
        assert_eq!(Blob::new(vec![0; 4096]).to_string(), "4096");
        assert_eq!(Blob::default().to_string(), "0");
        let bytes = [vec![1; 16], vec![0; 16], vec![2]].concat();
        assert_eq!(Blob::new(bytes).to_string(), format!("33 0:{} 32:02", "01".repeat(16)));
    }

    #[test]
    fn text_that_is_no_blob_is_refused() {
        for text in [
            "",
            " ",
            "-1",
            "a",
            "65537",
            "99999999999999999999",
            "4 0",
            "4 0:",
            "4 0:0",
            "4 0:0g",
            "4 0:00",
            "4 0:0000000001",
            "4 5:01",
            "4 18446744073709551615:0101",
            "16 0:01",
            "4 0:FF000000",
            "4  0:ff000000",
            "04 0:ff000000",
        ] {
            assert_eq!(text.parse::<Blob>(), Err(NoBlob), "{text:?}");
        }
        assert_eq!("4 0:ff000001".parse::<Blob>().unwrap().read::<u32>(), Some(0x0100_00ff));
        assert_eq!("5 0:ff00000100".parse::<Blob>().unwrap().read::<u32>(), None);
    }

    proptest! {
        #[test]
        fn a_blob_is_what_it_was(
            bytes in prop::collection::vec(prop_oneof![9 => Just(0u8), 1 => any::<u8>()], 0..400)
        ) {
            let blob = Blob::new(bytes);
            prop_assert_eq!(blob.to_string().parse::<Blob>().unwrap(), blob);
        }

        #[test]
        fn no_text_panics(text in "[0-9a-f: ]{0,40}") {
            if let Ok(blob) = text.parse::<Blob>() {
                prop_assert_eq!(blob.to_string(), text);
            }
        }
    }
}
