//! Output of consoles that nobody has taken yet.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::hex;

/// The most bytes of one console: what is kept of it.
const MOST: usize = 1 << 20;

/// Output, in hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output(pub Vec<u8>);

/// What is kept of each console, for whoever comes and takes it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConsolesState {
    /// The serial port.
    pub serial: Output,
    /// The virtio console.
    pub console: Output,
    /// The debug console.
    pub debug: Output,
}

impl ConsolesState {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Serialize for Output {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        hex::serialize(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for Output {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        hex::deserialize(deserializer, MOST).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_what_it_was_and_nothing_else_is_output() {
        let output = Output((0..=255).collect());
        let text = serde_json::to_string(&output).unwrap();
        assert_eq!(serde_json::from_str::<Output>(&text).unwrap(), output);
        let long = format!("\"{}\"", "00".repeat(MOST + 1));
        for wrong in ["\"0\"", "\"0g\"", "\"0A\"", "\"+1\"", "1", long.as_str()] {
            assert!(serde_json::from_str::<Output>(wrong).is_err());
        }
    }
}
