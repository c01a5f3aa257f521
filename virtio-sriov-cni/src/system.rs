//! The system that a command works on, and the command's input. Tests replace the system.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use vfctl::Roots;

use crate::config::Config;
use crate::error::Result;
use crate::governor::Governor;
use crate::log::Log;
use crate::namespace::Namespace;
use crate::netlink::Link;
use crate::parameters::Environment;
use crate::state::Store;

/// Steps of ADD, after each of which the plugin may be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The record is written.
    Recorded,
    /// The VF has its settings.
    Governed,
    /// The interface is in the temporary namespace.
    Temporary,
    /// It has its new name there.
    Renamed,
    /// It is in the container.
    Moved,
    /// It has its new address.
    Addressed,
    /// It is up.
    Up,
    /// The IPAM plugin has answered.
    Allocated,
    /// The interface has its IP addresses.
    Numbered,
    /// It has its routes.
    Routed,
    /// The neighbours know its addresses.
    Announced,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 11] = [
        Self::Recorded,
        Self::Governed,
        Self::Temporary,
        Self::Renamed,
        Self::Moved,
        Self::Addressed,
        Self::Up,
        Self::Allocated,
        Self::Numbered,
        Self::Routed,
        Self::Announced,
    ];
}

/// Files, channel and interfaces.
pub struct System<'a> {
    /// Folders of devices.
    pub roots: Roots,
    /// Records of attachments.
    pub store: Store,
    /// Opens the channel.
    pub channel: &'a dyn Fn() -> Result<Box<dyn Governor>>,
    /// The name of the device that has an interface.
    pub owner: fn(&Link) -> Option<String>,
    /// Writes to a file of sysfs that a driver has.
    pub write: &'a dyn Fn(&Path, &str) -> io::Result<()>,
    /// Receives each step of ADD.
    pub step: &'a dyn Fn(Step),
    /// Time until another run of the plugin releases a VF.
    pub limit: Duration,
}

impl System<'_> {
    /// The guest that this program runs in.
    pub fn real() -> Self {
        Self {
            roots: Roots::default(),
            store: Store::new(&PathBuf::from("/var/lib/cni")),
            channel: &crate::governor::open,
            owner: |link| link.parent.clone(),
            write: &|path, text| OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes()),
            step: &|_| {},
            limit: Duration::from_secs(60),
        }
    }
}

/// A command, except VERSION.
pub struct Run<'a> {
    /// The system.
    pub system: &'a System<'a>,
    /// The environment.
    pub environment: &'a Environment,
    /// The configuration.
    pub config: Config,
    /// The configuration as it arrived, for the IPAM plugin.
    pub input: &'a [u8],
    /// The log.
    pub log: Log,
    /// The namespace of the host.
    pub host: Namespace,
}
