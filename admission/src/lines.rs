//! Lines of the log that others can cause in any number: each place of the code writes ten in ten seconds, and the next line says how many
//! were left out. The bound holds for every line, so that no place has to think of it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

/// Lines from one place in a period.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// Writes lines as `F` does, but for those that are too many. What is asked for by a finer level than `info` is written in any case.
pub(crate) struct Bounded<F> {
    lines: F,
    /// There are as many places as the program has.
    places: Mutex<HashMap<Identifier, Place>>,
}

/// A place of the code that writes lines.
struct Place {
    since: Instant,
    /// Since then.
    lines: u32,
    withheld: u64,
}

impl<F> Bounded<F> {
    pub(crate) fn new(lines: F) -> Bounded<F> {
        let places = Mutex::default();
        Bounded { lines, places }
    }

    /// How many lines were left out before the next one, if that may be written.
    fn next(&self, of: &Metadata<'_>, now: Instant) -> Option<u64> {
        if *of.level() > Level::INFO {
            return Some(0);
        }
        // A panic elsewhere is that thread's failure; numbers are numbers.
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let place = places.entry(of.callsite()).or_insert(Place {
            since: now,
            lines: 0,
            withheld: 0,
        });
        if now >= place.since + PERIOD {
            (place.since, place.lines) = (now, 0);
        }
        place.lines = place.lines.saturating_add(1);
        if place.lines > LINES {
            place.withheld += 1;
            return None;
        }
        Some(std::mem::take(&mut place.withheld))
    }
}

impl<S, N, F> FormatEvent<S, N> for Bounded<F>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, of: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let Some(withheld) = self.next(event.metadata(), Instant::now()) else {
            return Ok(());
        };
        if withheld > 0 {
            writeln!(to, "({withheld} lines like the next one were left out)")?;
        }
        self.lines.format_event(of, to, event)
    }
}
