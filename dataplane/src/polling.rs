//! Who runs the kernel's receive work of our queues: this core, by busy polling, or whoever brings the packets.

use crate::engine::Engine;
use crate::port::{Attend, Attended, Port, RxQueue};

/// A landing session without packets for so long has paused: its queue is left to the sender's core.
const STREAM_PAUSE_NS: u64 = 200_000;
/// After so many packets without a pause the landing queue's work is kept to this core: telling the kernel takes as long as a few of
/// them. Not many more: where senders share a core each of their turns is a stream of its own, and after a pause the
/// senders' core would do the receiver's work as well.
const KEEP_AFTER: u32 = 64;

impl<P: Port> Engine<P> {
    /// Runs the kernel's receive work of a queue on this core while it carries a stream. For single messages the
    /// sender's core is faster: it has the packet at hand. And while small messages go to and fro, this core is kept free for them: a
    /// look at the landing queue takes all that has come there, some hundred microseconds of it.
    pub(crate) fn poll_queues(&mut self) {
        if self.small.stream.is_hot()
            && let Some(queue) = self.small.queue()
            && !self.small.has_come()
        {
            self.port.attend(queue, Attend::Now);
        }
        let now_ns = self.looks.now_ns();
        let Some(landing) = &mut self.landing else { return };
        let flow = &mut landing.flow;
        if std::mem::take(&mut flow.brought) {
            flow.brought_ns = now_ns;
        }
        let flows = !self.small.stream.is_exchange(now_ns)
            && (now_ns.saturating_sub(flow.brought_ns) < STREAM_PAUSE_NS
                || landing.sessions.quiet_ns(now_ns) < STREAM_PAUSE_NS);
        if !flows {
            flow.packets = 0;
            self.leave_queues();
            return;
        }
        if !flow.kept && flow.packets >= KEEP_AFTER {
            flow.packets = 0;
            flow.kept = self.port.attend(landing.queue, Attend::Alone) == Attended::Kept;
        }
        if (flow.kept || landing.sessions.awaits_packets()) && landing.rx.available(1) == 0 {
            self.port.attend(landing.queue, Attend::Now);
        }
    }

    /// This core polls no more: others run the queues again.
    #[inline]
    pub(crate) fn leave_queues(&mut self) {
        if let Some(landing) = &mut self.landing
            && landing.flow.kept
        {
            landing.flow.kept = self.port.attend(landing.queue, Attend::NoMore) == Attended::Kept;
        }
    }
}
