//! Bytes that a saved state holds as text in hexadecimal, two digits for each: half of the room of numbers.

use serde::{Deserialize, Serialize};

/// The most bytes: more than any device configuration has.
const MOST: usize = 512;

/// Bytes of a device configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HexBytes(pub Vec<u8>);

impl From<HexBytes> for String {
    fn from(HexBytes(bytes): HexBytes) -> Self {
        let digit = |value: u8| char::from_digit(value.into(), 16).unwrap_or_default();
        bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
    }
}

impl TryFrom<String> for HexBytes {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        let wrong = "not bytes in hexadecimal, at most 512";
        if text.len() > 2 * MOST {
            return Err(wrong);
        }
        let digit = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        let byte = |pair: &[u8]| match pair {
            [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
            _ => None,
        };
        text.as_bytes().chunks(2).map(byte).collect::<Option<_>>().map(Self).ok_or(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_back_and_other_text_is_refused() {
        let bytes = HexBytes((0..=255).collect());
        assert_eq!(HexBytes::try_from(String::from(bytes.clone())), Ok(bytes));
        for text in ["0", "0g", "A0", "00 ", "é0"] {
            assert!(HexBytes::try_from(text.to_string()).is_err(), "{text}");
        }
        assert!(HexBytes::try_from("00".repeat(MOST)).is_ok());
        assert!(HexBytes::try_from("00".repeat(MOST + 1)).is_err());
    }
}
