//! Changes of VFs, which the VMM announces on the port [`EVENTS_PORT`].

use std::time::{Duration, Instant};

use vm_api::channel::{EVENTS_PORT, MAX_REPLY, Notice};

use crate::error::Error;
use crate::lines::Lines;
use crate::port::{self, Port};
use crate::roots::Roots;

/// The open port of notices. One program of the guest has it at a time. It does not keep others from the channel.
#[derive(Debug)]
pub struct Events {
    port: Port,
    lines: Lines,
}

impl Events {
    /// Opens the port of this guest. `limit` bounds the time until another program has closed it.
    ///
    /// # Errors
    ///
    /// [`Error::NoChannel`], [`Error::NoNode`], [`Error::NoPermission`], [`Error::Busy`] or [`Error::Io`].
    pub fn open(limit: Duration) -> Result<Self, Error> {
        Self::open_in(&Roots::default(), limit)
    }

    /// Opens the port that is below other folders. Otherwise as [`Events::open`].
    ///
    /// # Errors
    ///
    /// Fails as [`Events::open`] does.
    pub fn open_in(roots: &Roots, limit: Duration) -> Result<Self, Error> {
        let node = port::find(roots, EVENTS_PORT)?;
        Ok(Self { port: Port::open(node, Instant::now() + limit)?, lines: Lines::new(MAX_REPLY) })
    }

    /// Waits for the next notice, without limit. Lines that are not notices are skipped.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the port is gone.
    pub fn next_notice(&mut self) -> Result<Notice, Error> {
        let mut buffer = [0; 4096];
        loop {
            while let Some(line) = self.lines.next() {
                if let Ok(notice) = serde_json::from_slice(&line) {
                    return Ok(notice);
                }
            }
            let count = self.port.read(&mut buffer, None)?;
            self.lines.push(buffer.get(..count).unwrap_or_default());
        }
    }
}
