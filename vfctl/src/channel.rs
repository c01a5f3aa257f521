//! Requests to the VMM, one at a time, over the port [`CONTROL_PORT`].

use std::fs::File;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use vm_api::channel::{
    CONTROL_PORT, Command, Hello, List, Listed, MAX_REPLY, MAX_REQUEST, Named, Reply, Request, Set, VERSION, VfState,
    Welcome,
};

use crate::error::Error;
use crate::lines::Lines;
use crate::port::{self, Port};
use crate::roots::Roots;

/// The open channel. One program of the guest has it at a time, so close it (drop it) soon.
#[derive(Debug)]
pub struct Channel {
    // Closed before the lock is released, so that the next program finds the port free.
    port: Port,
    _lock: Option<File>,
    lines: Lines,
    limit: Duration,
    next_id: u64,
}

impl Channel {
    /// Opens the channel of this guest. `limit` bounds the time until other programs have closed it, and each request.
    ///
    /// # Errors
    ///
    /// [`Error::NoChannel`], [`Error::NoNode`], [`Error::NoPermission`], [`Error::Busy`] or [`Error::Io`].
    pub fn open(limit: Duration) -> Result<Self, Error> {
        Self::open_in(&Roots::default(), limit)
    }

    /// Opens the channel that is below other folders. Otherwise as [`Channel::open`].
    ///
    /// # Errors
    ///
    /// Fails as [`Channel::open`] does.
    pub fn open_in(roots: &Roots, limit: Duration) -> Result<Self, Error> {
        let until = Instant::now() + limit;
        let node = port::find(roots, CONTROL_PORT)?;
        let lock = port::lock(&roots.lock(), until)?;
        let port = Port::open(node, until)?;
        Ok(Self { port, _lock: lock, lines: Lines::new(MAX_REPLY), limit, next_id: first_id() })
    }

    /// Asks for the version and the PFs.
    ///
    /// # Errors
    ///
    /// [`Error::NoAnswer`], [`Error::Refused`], [`Error::Io`], and [`Error::Unexpected`] for another version.
    pub fn hello(&mut self) -> Result<Welcome, Error> {
        let welcome: Welcome = self.call(Command::Hello(Hello { version: VERSION }))?;
        match welcome.version {
            VERSION => Ok(welcome),
            other => Err(Error::Unexpected(format!("version {other} instead of {VERSION}"))),
        }
    }

    /// Asks for all enabled VFs of the PF at the PCI address `pf`, in the order of their indices.
    ///
    /// # Errors
    ///
    /// [`Error::NoAnswer`], [`Error::Refused`], [`Error::Unexpected`] or [`Error::Io`].
    pub fn list(&mut self, pf: &str) -> Result<Vec<VfState>, Error> {
        let (mut all, mut from) = (Vec::new(), 0);
        loop {
            let listed: Listed = self.call(Command::List(List { pf: pf.to_owned(), from }))?;
            all.extend(listed.vfs);
            match listed.next {
                None => return Ok(all),
                Some(next) if next > from => from = next,
                Some(next) => return Err(Error::Unexpected(format!("VF {next} follows VF {from}"))),
            }
        }
    }

    /// Asks for the VF at the PCI address `vf`.
    ///
    /// # Errors
    ///
    /// As [`Channel::list`].
    pub fn get(&mut self, vf: &str) -> Result<VfState, Error> {
        self.call(Command::Get(Named { vf: vf.to_owned() }))
    }

    /// Changes settings of a VF, all or none. Returns the VF after that.
    ///
    /// # Errors
    ///
    /// As [`Channel::list`]. After [`Error::NoAnswer`] the change may have been made.
    pub fn set(&mut self, set: &Set) -> Result<VfState, Error> {
        self.call(Command::Set(set.clone()))
    }

    /// Returns the VF at the PCI address `vf` to the host's settings. Returns the VF after that.
    ///
    /// # Errors
    ///
    /// As [`Channel::set`].
    pub fn reset(&mut self, vf: &str) -> Result<VfState, Error> {
        self.call(Command::Reset(Named { vf: vf.to_owned() }))
    }

    /// Sends one request, and reads lines until its reply. Other lines are skipped.
    fn call<T: DeserializeOwned>(&mut self, command: Command) -> Result<T, Error> {
        let until = Instant::now() + self.limit;
        let id = self.next_id;
        self.next_id += 1;
        let request = serde_json::to_vec(&Request::new(id, command));
        let mut line = request.map_err(|error| Error::Unexpected(error.to_string()))?;
        line.push(b'\n');
        if line.len() > MAX_REQUEST {
            return Err(Error::Unexpected(format!("a request of {} bytes", line.len())));
        }
        let no_answer = Error::NoAnswer { seconds: self.limit.as_secs_f64() };
        if !self.port.write(&line, until)? {
            return Err(no_answer);
        }
        match self.reply(id, until)? {
            Some(Reply { ok: Some(value), .. }) => {
                serde_json::from_value(value).map_err(|error| Error::Unexpected(error.to_string()))
            }
            Some(Reply { error: Some(refusal), .. }) => Err(Error::Refused(refusal)),
            Some(_) => Err(Error::Unexpected("neither ok nor error".to_owned())),
            None => Err(no_answer),
        }
    }

    /// The reply with the number `id`. `None` after `until`, unless a request without a number was refused: then it is
    /// taken for this one.
    fn reply(&mut self, id: u64, until: Instant) -> Result<Option<Reply>, Error> {
        let mut buffer = [0; 4096];
        let mut unnumbered = None;
        loop {
            while let Some(line) = self.lines.next() {
                match serde_json::from_slice::<Reply>(&line) {
                    Ok(reply) if reply.id == Some(id) => return Ok(Some(reply)),
                    Ok(reply) if reply.id.is_none() && reply.error.is_some() => unnumbered = Some(reply),
                    _ => {}
                }
            }
            let count = if Instant::now() < until { self.port.read(&mut buffer, Some(until))? } else { 0 };
            match buffer.get(..count) {
                None | Some([]) => return Ok(unnumbered),
                Some(bytes) => self.lines.push(bytes),
            }
        }
    }
}

/// A number that the requests of an earlier program, whose replies may still arrive, have most likely not had.
fn first_id() -> u64 {
    let mut bytes = [0; 4];
    // Without random bytes a number is still one.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK);
    u64::from(u32::from_ne_bytes(bytes)) << 16
}
