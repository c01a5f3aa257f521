//! Events of the VM: `--event-monitor`.
//!
//! The format is Cloud Hypervisor's: JSON objects, each followed by an empty line. Clients read them into fixed-size
//! buffers and find their ends by counting braces, so an object is shorter than 4 KiB, and its strings contain no
//! braces.
//!
//! A separate thread writes, so that reporting an event never blocks. While the reader is slow, or not there yet,
//! events are queued; when the queue is full, they are dropped and counted. With `-v`, each event is also a line of the
//! log, and the thread runs without `--event-monitor`, too. Events that a guest can cause at will are
//! not queued: the guest's action only marks that something changed, and the thread compares states later, at a limited
//! rate, so that no guest can fill the host's disk.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use virtio_devices::{NewThread, RateLimit, RateLimiter};

use crate::landlock;
use crate::telemetry::log_line::log_event;
use crate::telemetry::monitor::Output;
use crate::telemetry::rotated::Rotated;
use crate::telemetry::wall_clock;
use crate::telemetry::writer::Writer;
use crate::threads::{self, ThreadKind};

/// Stack of the thread, in bytes.
const STACK: usize = 256 << 10;
/// Limit on queued events.
const MOST_WAITING: usize = 256;
/// Time to wait for the reader at exit. Tests, which read the file only then, need more on a busy machine.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 10 } else { 1 });
/// Limit on a property's text, in characters. An escaped character takes up to 12 bytes.
const LONGEST_TEXT: usize = 256;
/// Limit on the texts of all properties of an event, in bytes. With the rest, the event fits into 4 KiB.
const LONGEST_PROPERTIES: usize = 3540;
/// Pause after a check, per event that it reported.
const PACE: Duration = Duration::from_millis(10);
/// Rate limit of events that a guest can cause: enough for thousands of VFs and several reboots, then one per second.
const OF_GUEST: RateLimit = RateLimit { size: 1 << 16, one_time_burst: 0, refill: Duration::from_secs(1 << 16) };

/// Subject of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The program.
    Vmm,
    /// The VM.
    Vm,
    /// A virtio function.
    VirtioDevice,
    /// A PF and its VFs.
    Sriov,
    /// Guest software.
    Guest,
    /// A host device.
    Vfio,
}

/// Properties of an event. All values are strings, as in Cloud Hypervisor.
pub(crate) type Properties<'a> = &'a [(&'static str, &'a str)];

/// Reports an event.
pub(crate) type Tell<'a> = &'a mut dyn FnMut(Source, &'static str, Properties<'_>);

/// State that guests change. The event thread checks it after [`Events::look`].
pub trait Watched: Send + Sync {
    /// Reports changes since the last check.
    fn look(&self, tell: Tell<'_>);

    /// Ends the reports: the host removes the device without a request of the guest.
    fn end(&self) {}
}

/// Sender of events. Without `--event-monitor`, this does nothing.
#[derive(Clone, Default)]
pub struct Events(Option<Arc<Shared>>);

struct Shared {
    /// Start of the events' timestamps.
    origin: Instant,
    /// False if events go to the log alone.
    is_written: bool,
    state: Mutex<State>,
    /// Signalled for a new event, a check, and the end.
    woken: Condvar,
    /// Signalled when the thread has ended.
    done: Condvar,
    dropped: AtomicU64,
    /// The file, if it can be opened again. Only the control thread locks this.
    rotated: Mutex<Option<Rotated>>,
}

#[derive(Default)]
struct State {
    /// The file that takes further events.
    reopened: Option<File>,
    waiting: VecDeque<Waiting>,
    watched: Vec<Weak<dyn Watched>>,
    /// True if one of `watched` may have changed.
    look: bool,
    /// True if there will be no more events.
    ended: bool,
    /// True if the thread has ended.
    done: bool,
}

/// Entry of the queue, in order.
enum Waiting {
    /// Write a text.
    Text(String),
    /// Check all watched states.
    Look,
}

impl Events {
    /// Reports an event.
    pub fn tell(&self, source: Source, event: &'static str, properties: Properties<'_>) {
        log_event(source == Source::Vmm, event, properties);
        let Some(shared) = self.0.as_ref().filter(|shared| shared.is_written) else { return };
        let text = text(shared.now(), source, event, properties);
        let mut state = shared.state.lock();
        if state.waiting.len() >= MOST_WAITING {
            drop(state);
            shared.drop_one();
            return;
        }
        state.waiting.push_back(Waiting::Text(text));
        shared.woken.notify_one();
    }

    /// Queues a check of all watched states, before later events are written.
    pub fn look_first(&self) {
        let Some(shared) = &self.0 else { return };
        let mut state = shared.state.lock();
        if state.waiting.len() < MOST_WAITING {
            state.waiting.push_back(Waiting::Look);
            shared.woken.notify_one();
        }
    }

    /// Ends the reports of devices, because their VM is being shut down.
    pub fn end_watches(&self) {
        let Some(shared) = &self.0 else { return };
        let watched: Vec<_> = shared.state.lock().watched.iter().filter_map(Weak::upgrade).collect();
        watched.iter().for_each(|watched| watched.end());
    }

    /// Reports an event of the program.
    pub fn vmm(&self, event: &'static str) {
        self.tell(Source::Vmm, event, &[]);
    }

    /// Reports an event of the VM.
    pub fn vm(&self, event: &'static str) {
        self.tell(Source::Vm, event, &[]);
    }

    /// Registers `watched` for checks after [`Self::look`], until it is dropped.
    pub fn watch(&self, watched: Weak<dyn Watched>) {
        let Some(shared) = &self.0 else { return };
        let mut state = shared.state.lock();
        state.watched.retain(|watched| watched.strong_count() > 0);
        state.watched.push(watched);
    }

    /// Requests a check of all watched states.
    pub fn look(&self) {
        let Some(shared) = &self.0 else { return };
        shared.state.lock().look = true;
        shared.woken.notify_one();
    }

    /// Opens the file of the events at its path again, if another file or none is there now.
    ///
    /// # Errors
    ///
    /// Fails with one line. Events are written to the former file.
    pub(crate) fn reopen(&self) -> Result<(), String> {
        let Some(shared) = &self.0 else { return Ok(()) };
        let Some(rotated) = &mut *shared.rotated.lock() else { return Ok(()) };
        if let Some(file) = rotated.reopen()? {
            shared.state.lock().reopened = Some(file);
            shared.woken.notify_one();
        }
        Ok(())
    }

    /// Number of dropped events: the queue was full, or the reader has closed.
    pub fn dropped(&self) -> u64 {
        self.0.as_ref().map_or(0, |shared| shared.dropped.load(Ordering::Relaxed))
    }
}

/// Next job of the event thread.
enum Job {
    /// Write a text.
    Tell(String),
    /// Check these states.
    Look(Vec<Arc<dyn Watched>>),
    /// Continue in this file.
    Continue(File),
    /// End.
    End,
}

impl Shared {
    /// The present time: since the start, and in UTC.
    fn now(&self) -> (Duration, String) {
        (self.origin.elapsed(), wall_clock::now())
    }

    /// Counts a dropped event. Logs the 1st, 2nd, 4th, 8th...
    fn drop_one(&self) {
        let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
        if dropped.is_power_of_two() {
            log::warn!("events are dropped because nothing reads --event-monitor, {dropped} so far; start its reader");
        }
    }

    /// Waits for the next job. Checks after [`Events::look`] start at `look_at` at the earliest.
    fn next(&self, look_at: Instant) -> Job {
        let mut state = self.state.lock();
        loop {
            if let Some(file) = state.reopened.take() {
                return Job::Continue(file);
            }
            let watched = |state: &State| state.watched.iter().filter_map(Weak::upgrade).collect();
            match state.waiting.pop_front() {
                Some(Waiting::Text(text)) => return Job::Tell(text),
                Some(Waiting::Look) => return Job::Look(watched(&state)),
                None => {}
            }
            match state.look {
                _ if state.ended => return Job::End,
                true if look_at <= Instant::now() => {
                    state.look = false;
                    return Job::Look(watched(&state));
                }
                true => _ = self.woken.wait_until(&mut state, look_at),
                false => self.woken.wait(&mut state),
            }
        }
    }

    fn write_all(&self, output: Output, of_guest: RateLimit) {
        let output = match output.wait() {
            Ok(output) => output,
            Err(error) => {
                log::warn!("no events are written: --event-monitor can no longer be opened: {error}");
                return;
            }
        };
        let mut output = output.map(Writer::new);
        let mut look_at = Instant::now();
        let mut of_guest = RateLimiter::of_ops(of_guest, look_at);
        loop {
            match self.next(look_at) {
                Job::Tell(text) => self.write(output.as_mut(), &text),
                Job::Look(watched) => {
                    let (mut told, now) = (0, Instant::now());
                    let mut tell = |source, event, properties: Properties<'_>| {
                        told += 1;
                        of_guest.take_op(now);
                        log_event(source == Source::Vmm, event, properties);
                        if let Some(output) = &mut output {
                            self.write(Some(output), &text(self.now(), source, event, properties));
                        }
                    };
                    watched.iter().for_each(|watched| watched.look(&mut tell));
                    look_at = Instant::now() + (PACE * told).max(of_guest.wait(now));
                }
                Job::Continue(file) => {
                    if !output.as_mut().is_none_or(|output| output.replace(file)) {
                        self.drop_one();
                    }
                }
                Job::End => return output.into_iter().for_each(Writer::end),
            }
        }
    }

    fn write(&self, output: Option<&mut Writer<File>>, text: &str) {
        if let Some(Err(error)) = output.map(|output| output.write(text)) {
            log::debug!("an event cannot be written: {error}");
            self.drop_one();
        }
    }
}

/// Handle to the event thread. Dropping this gives the reader up to a second for the remaining events.
pub(crate) struct EventStream(Arc<Shared>);

impl EventStream {
    /// Starts writing events to `output`, with timestamps relative to `origin`.
    ///
    /// # Errors
    ///
    /// Fails if the thread cannot be started.
    pub(crate) fn start(output: Output, origin: Instant) -> io::Result<(Self, Events)> {
        Self::limited(output, origin, OF_GUEST)
    }

    /// As [`Self::start`], with another limit on events that a guest can cause.
    fn limited(mut output: Output, origin: Instant, of_guest: RateLimit) -> io::Result<(Self, Events)> {
        let shared = Arc::new(Shared {
            origin,
            is_written: !matches!(output, Output::LogAlone),
            state: Mutex::default(),
            woken: Condvar::new(),
            done: Condvar::new(),
            dropped: AtomicU64::new(0),
            rotated: Mutex::new(output.take_rotated()),
        });
        let writer = Arc::clone(&shared);
        let pipe = match &output {
            Output::Open(..) | Output::LogAlone => None,
            Output::NoReader(path) => Some(path.clone()),
        };
        let run = move || {
            writer.write_all(output, of_guest);
            writer.state.lock().done = true;
            writer.done.notify_all();
        };
        let kind = ThreadKind::EventMonitor;
        threads::start(kind, NewThread::new(kind.name(), STACK, run).after(landlock::isolation(pipe)))?;
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

/// An event as written.
#[derive(Serialize)]
struct Event<'a> {
    timestamp: Timestamp,
    /// Date and time in UTC (RFC 3339).
    time: String,
    source: Source,
    event: &'static str,
    #[serde(serialize_with = "properties")]
    properties: Properties<'a>,
}

/// Time since the program started.
#[derive(Serialize)]
struct Timestamp {
    secs: u64,
    nanos: u32,
}

/// Serializes properties as an object, or null if there are none. Cuts long texts.
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

/// Length of a character in bytes, after [`plain`].
fn escaped_len(c: char) -> usize {
    match c {
        '"' | '\\' => 2,
        '{' | '}' => 6,
        c if c.is_ascii_control() || !c.is_ascii() => 6 * c.len_utf16(),
        _ => 1,
    }
}

fn text((since, time): (Duration, String), source: Source, event: &'static str, properties: Properties<'_>) -> String {
    let timestamp = Timestamp { secs: since.as_secs(), nanos: since.subsec_nanos() };
    let event = Event { timestamp, time, source, event, properties };
    // Serialization cannot fail: all map keys are strings.
    let mut text = plain(&serde_json::to_string_pretty(&event).unwrap_or_default());
    text.push_str("\n\n");
    text
}

/// Escapes non-ASCII characters, and braces within strings.
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
mod tests;
