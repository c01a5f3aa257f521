//! What the machine is beyond its devices: `--platform`.

use option_derive::Options;
use serde::Serialize;

/// The machine as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options)]
#[options("--platform")]
pub struct PlatformConfig {
    /// Number of PCI segments, 1 to 96.
    #[option("num_pci_segments=<number>", default = 1)]
    pub num_pci_segments: u16,
}
