//! The NIC that the guest sees: the values of `model`.

use option_derive::Schema;
use serde::{Deserialize, Serialize};

use crate::config::value::Value;

/// NIC that the guest sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "lowercase")]
#[schema(shows_default)]
pub enum NicModel {
    /// A virtio NIC, or a virtio PF with VFs that the host configures.
    #[default]
    Virtio,
    /// An Intel X550 with VFs that the guest configures.
    X550,
    /// An Intel X540, otherwise as x550.
    X540,
}

impl NicModel {
    /// All models, in the order of messages.
    pub const ALL: [Self; 3] = [Self::Virtio, Self::X550, Self::X540];

    /// True for the default, which JSON leaves out.
    pub fn is_virtio(&self) -> bool {
        *self == Self::Virtio
    }

    /// As on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::X550 => "x550",
            Self::X540 => "x540",
        }
    }
}

impl Value for NicModel {
    fn parse(text: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|model| text.eq_ignore_ascii_case(model.name()));
        named.ok_or_else(|| "give virtio, x550 or x540".to_string())
    }

    fn print(&self) -> Option<String> {
        Some(self.name().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_the_same_on_the_command_line_and_in_json() {
        for model in NicModel::ALL {
            assert_eq!((NicModel::parse(model.name()), model.print().as_deref()), (Ok(model), Some(model.name())));
            assert_eq!(serde_json::to_value(model).unwrap(), model.name());
        }
        assert_eq!(NicModel::parse("X550"), Ok(NicModel::X550));
        assert!(NicModel::default().is_virtio());
        for wrong in ["x710", "x55", "igb", "virtio-net", "on"] {
            assert_eq!(NicModel::parse(wrong), Err("give virtio, x550 or x540".to_string()), "{wrong}");
            assert!(serde_json::from_value::<NicModel>(wrong.into()).is_err(), "{wrong}");
        }
    }
}
