//! What happens to the virtual machine, told to whoever listens: `--event-monitor`.
//!
//! The form is Cloud Hypervisor's: JSON objects, each followed by an empty line. Clients read them into buffers of a fixed size, and
//! find their ends by counting braces: an object is shorter than 4 KiB, and no string in it has a brace.
//!
//! A thread of its own writes. Who tells an event never waits: while the reader is slow, or has not come, events are kept, and when
//! there are too many of them, dropped and counted. What a guest can cause again and again is not kept at all: the thread is told
//! that there is something to look at, and looks when it can, at a limited rate.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::Serialize;

use crate::event_monitor::Output;

/// Events that wait for the reader.
const MOST_WAITING: usize = 256;
/// How long the end of the program waits for the reader.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest text of a property, in characters: escaped, each takes up to 12 bytes.
const LONGEST_TEXT: usize = 256;
/// What the texts of all properties of an event may take together, in bytes: the rest of it fits into what is left of 4 KiB.
const LONGEST_PROPERTIES: usize = 3600;
/// How long nothing is looked at for each event that the last look had to tell: what guests cause is bounded.
const PACE: Duration = Duration::from_millis(10);

/// Whom an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// This program.
    Vmm,
    /// The virtual machine.
    Vm,
    /// A virtio function.
    VirtioDevice,
    /// A physical function and its VFs.
    Sriov,
}

/// What an event says beyond its name. All values are texts, as in Cloud Hypervisor.
pub type Properties<'a> = &'a [(&'static str, &'a str)];

/// Tells an event.
pub type Tell<'a> = &'a mut dyn FnMut(Source, &'static str, Properties<'_>);

/// What guests change: looked at by the thread that tells events, after [`Events::look`].
pub trait Watched: Send + Sync {
    /// Tells what has changed since the last look.
    fn look(&self, tell: Tell<'_>);
}

/// Where events are told. Without anybody who listens, nothing is done.
#[derive(Clone, Default)]
pub struct Events(Option<Arc<Shared>>);

struct Shared {
    /// When the clock of events began.
    origin: Instant,
    state: Mutex<State>,
    /// An event waits, or there will be no more.
    woken: Condvar,
    /// The thread has ended.
    done: Condvar,
    dropped: AtomicU64,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<String>,
    watched: Vec<Weak<dyn Watched>>,
    /// One of them may have changed.
    look: bool,
    /// There will be no more events.
    ended: bool,
    /// All have been written that ever will be.
    done: bool,
}

impl Events {
    /// Tells an event.
    pub fn tell(&self, source: Source, event: &'static str, properties: Properties<'_>) {
        let Some(shared) = &self.0 else { return };
        let text = text(shared.origin.elapsed(), source, event, properties);
        let mut state = shared.state.lock();
        if state.waiting.len() >= MOST_WAITING {
            drop(state);
            shared.drop_one();
            return;
        }
        state.waiting.push_back(text);
        shared.woken.notify_one();
    }

    /// Tells what this program does.
    pub fn vmm(&self, event: &'static str) {
        self.tell(Source::Vmm, event, &[]);
    }

    /// Tells what the virtual machine does.
    pub fn vm(&self, event: &'static str) {
        self.tell(Source::Vm, event, &[]);
    }

    /// Lets the thread that tells events look at `watched`, whenever [`Self::look`] says so, until it is gone.
    pub fn watch(&self, watched: Weak<dyn Watched>) {
        let Some(shared) = &self.0 else { return };
        let mut state = shared.state.lock();
        state.watched.retain(|watched| watched.strong_count() > 0);
        state.watched.push(watched);
    }

    /// Says that something that is watched has changed.
    pub fn look(&self) {
        let Some(shared) = &self.0 else { return };
        shared.state.lock().look = true;
        shared.woken.notify_one();
    }

    /// How many events nobody will hear of: there were too many, or the reader is gone.
    pub fn dropped(&self) -> u64 {
        self.0.as_ref().map_or(0, |shared| shared.dropped.load(Ordering::Relaxed))
    }
}

/// What the thread does next.
enum Next {
    /// Write this.
    Tell(String),
    /// Look at these.
    Look(Vec<Arc<dyn Watched>>),
    /// End.
    End,
}

impl Shared {
    /// Counts an event that is dropped. The 1st, 2nd, 4th, 8th and so on are told of.
    fn drop_one(&self) {
        let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
        if dropped.is_power_of_two() {
            log::warn!("events that nobody took are dropped, {dropped} so far: read what --event-monitor names");
        }
    }

    /// What is to be done next, where nothing is looked at before `look_at`.
    fn next(&self, look_at: Instant) -> Next {
        let mut state = self.state.lock();
        loop {
            if let Some(text) = state.waiting.pop_front() {
                return Next::Tell(text);
            }
            match state.look {
                _ if state.ended => return Next::End,
                true if look_at <= Instant::now() => {
                    state.look = false;
                    return Next::Look(state.watched.iter().filter_map(Weak::upgrade).collect());
                }
                true => _ = self.woken.wait_until(&mut state, look_at),
                false => self.woken.wait(&mut state),
            }
        }
    }

    fn write_all(&self, output: Output) {
        let output = match output.wait() {
            Ok(output) => output,
            Err(error) => {
                log::warn!("events cannot be told: --event-monitor cannot be opened any more: {error}");
                return;
            }
        };
        let mut look_at = Instant::now();
        loop {
            match self.next(look_at) {
                Next::Tell(text) => self.write(&output, &text),
                Next::Look(watched) => {
                    let mut told = 0;
                    let mut tell = |source, event, properties: Properties<'_>| {
                        told += 1;
                        self.write(&output, &text(self.origin.elapsed(), source, event, properties));
                    };
                    watched.iter().for_each(|watched| watched.look(&mut tell));
                    look_at = Instant::now() + PACE * told;
                }
                Next::End => return,
            }
        }
    }

    fn write(&self, output: &File, text: &str) {
        if let Err(error) = write(output, text.as_bytes()) {
            log::debug!("an event cannot be told: {error}");
            self.drop_one();
        }
    }
}

/// The thread that tells events. Dropping it gives the reader a moment to take those that are left.
pub struct EventStream(Arc<Shared>);

impl EventStream {
    /// Starts to tell events to `output`, whose clock begins at `origin`.
    ///
    /// # Errors
    ///
    /// When there can be no further thread.
    pub fn start(output: Output, origin: Instant) -> io::Result<(Self, Events)> {
        let shared = Arc::new(Shared {
            origin,
            state: Mutex::default(),
            woken: Condvar::new(),
            done: Condvar::new(),
            dropped: AtomicU64::new(0),
        });
        let writer = Arc::clone(&shared);
        thread::Builder::new().name("event-monitor".to_string()).spawn(move || {
            writer.write_all(output);
            writer.state.lock().done = true;
            writer.done.notify_all();
        })?;
        Ok((Self(Arc::clone(&shared)), Events(Some(shared))))
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        let until = Instant::now() + PATIENCE;
        let mut state = self.0.state.lock();
        state.ended = true;
        self.0.woken.notify_one();
        // A thread that still waits for its reader ends with the process.
        self.0.done.wait_while_until(&mut state, |state| !state.done, until);
    }
}

/// Writes all of `bytes`, and waits for room. A descriptor that was passed in may be one that waits by itself.
fn write(mut output: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match poll(&mut [PollFd::new(output, PollFlags::OUT)], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        match io::Write::write(&mut output, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// An event as it is written.
#[derive(Serialize)]
struct Event<'a> {
    timestamp: Timestamp,
    source: Source,
    event: &'static str,
    #[serde(serialize_with = "properties")]
    properties: Properties<'a>,
}

/// The time since the program started.
#[derive(Serialize)]
struct Timestamp {
    secs: u64,
    nanos: u32,
}

/// An object, or null if there are none.
fn properties<S: serde::Serializer>(properties: &Properties<'_>, serializer: S) -> Result<S::Ok, S::Error> {
    if properties.is_empty() {
        return serializer.serialize_none();
    }
    let mut left = LONGEST_PROPERTIES;
    let mut fits = |c: &char| {
        let rest = left.checked_sub(escaped_len(*c));
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    let mut shortened = |text: &str| text.chars().take(LONGEST_TEXT).take_while(&mut fits).collect::<String>();
    serializer.collect_map(properties.iter().map(|(name, text)| (name, shortened(text))))
}

/// How many bytes [`plain`] makes of a character of a string.
fn escaped_len(c: char) -> usize {
    match c {
        '"' | '\\' => 2,
        '{' | '}' => 6,
        c if c.is_ascii_control() || !c.is_ascii() => 6 * c.len_utf16(),
        _ => 1,
    }
}

fn text(since: Duration, source: Source, event: &'static str, properties: Properties<'_>) -> String {
    let timestamp = Timestamp { secs: since.as_secs(), nanos: since.subsec_nanos() };
    let event = Event { timestamp, source, event, properties };
    // Its maps have texts for keys: it can always be written.
    let mut text = plain(&serde_json::to_string_pretty(&event).unwrap_or_default());
    text.push_str("\n\n");
    text
}

/// `json` with braces in its strings escaped, and whatever is not ASCII.
fn plain(json: &str) -> String {
    let mut text = String::with_capacity(json.len() + 2);
    let (mut in_string, mut escaped) = (false, false);
    for c in json.chars() {
        match c {
            '{' | '}' if in_string => _ = write!(text, "\\u{:04x}", u32::from(c)),
            c if !c.is_ascii() => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| _ = write!(text, "\\u{unit:04x}")),
            c => text.push(c),
        }
        in_string ^= c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
    }
    text
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
