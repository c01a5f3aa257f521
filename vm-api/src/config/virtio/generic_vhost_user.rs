//! vhost-user devices of any type: `--generic-vhost-user`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::{Deserialize, Serialize};

use crate::config::value::{Value, digits};
use crate::schema::{Components, Schema};

/// A device of any type that another process runs over vhost-user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--generic-vhost-user")]
pub struct GenericVhostUserConfig {
    /// Type of the device (virtio 1.3 section 5): a number, or a name such as gpu, i2c or sound.
    #[option("device_type=<number or name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 63)]
    #[schema(about = "Type of the device (virtio 1.3 section 5). Required, unless virtio_id has it. Virtual IOMMUs \
                      (23) and watchdogs (35) are refused.")]
    pub device_type: Option<DeviceType>,
    /// Older name of device_type.
    #[option("virtio_id=<number or name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 63)]
    pub virtio_id: Option<DeviceType>,
    /// Unix socket that the backend listens on.
    #[option("socket=<path>", required)]
    #[schema(limits = SOCKET)]
    pub socket: PathBuf,
    /// Entries in each queue, such as [64,64], each a power of two from 2 to 32768.
    #[option("queue_sizes=[<number>,...]", required)]
    #[schema(min_items = 1, max_items = 256, items(minimum = 2, maximum = 32_768))]
    pub queue_sizes: Vec<u16>,
    /// Device name, unique in the VM. It must not start with two underscores. By default
    /// _generic_vhost_userN, where N counts all devices without a name.
    #[option("id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = ID)]
    pub id: Option<String>,
    /// PCI segment.
    #[option("pci_segment=<number>")]
    pub pci_segment: u16,
    /// Device number on bus 0, 1 to 31, or 0 on another segment than 0. By default the lowest free one.
    #[option("pci_device_id=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = SLOT)]
    pub pci_device_id: Option<u8>,
}

/// A type of virtio device. In JSON its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceType(pub u32);

impl Schema for DeviceType {
    fn describe(components: &mut Components) -> serde_json::Value {
        u32::describe(components)
    }
}

/// The types with names on the command line.
const NAMES: &[(&str, u32)] = &[
    ("net", 1),
    ("block", 2),
    ("console", 3),
    ("rng", 4),
    ("balloon", 5),
    ("scsi", 8),
    ("9p", 9),
    ("gpu", 16),
    ("rtc", 17),
    ("input", 18),
    ("vsock", 19),
    ("crypto", 20),
    ("iommu", 23),
    ("mem", 24),
    ("sound", 25),
    ("fs", 26),
    ("pmem", 27),
    ("rpmb", 28),
    ("video-encoder", 30),
    ("video-decoder", 31),
    ("scmi", 32),
    ("i2c", 34),
    ("watchdog", 35),
    ("can", 36),
    ("bluetooth", 40),
    ("gpio", 41),
];

impl Value for DeviceType {
    fn parse(text: &str) -> Result<Self, String> {
        let named = NAMES.iter().find(|(name, _)| *name == text).map(|(_, number)| *number);
        let number = named.or_else(|| digits(text).and_then(|digits| digits.parse().ok()));
        number.map(Self).ok_or_else(|| {
            let names: Vec<_> = NAMES.iter().map(|(name, _)| *name).collect();
            format!("give the number of a type of virtio device, or one of {}", names.join(", "))
        })
    }

    fn print(&self) -> Option<String> {
        Some(self.0.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_is_a_number_or_a_name() {
        let device = |text: &str| text.parse::<GenericVhostUserConfig>();
        let sound = device("device_type=sound,socket=/s,queue_sizes=[64,64]").unwrap();
        assert_eq!((sound.device_type, &sound.queue_sizes[..]), (Some(DeviceType(25)), &[64, 64][..]));
        assert_eq!(sound.to_string().parse(), Ok(sound.clone()));
        assert_eq!(device("virtio_id=25,socket=/s,queue_sizes=[64,64]").unwrap().virtio_id, Some(DeviceType(25)));
        let json = r#"{"device_type": 25, "socket": "/s", "queue_sizes": [64, 64]}"#;
        assert_eq!(serde_json::from_str::<GenericVhostUserConfig>(json).unwrap(), sound);
        let said = device("device_type=toaster,socket=/s,queue_sizes=[1]").unwrap_err().to_string();
        assert!(
            said.contains("device_type=toaster: give the number of a type of virtio device, or one of net,"),
            "{said}"
        );
        assert!(device("device_type=1,socket=/s").unwrap_err().to_string().contains("queue_sizes"));
    }
}
