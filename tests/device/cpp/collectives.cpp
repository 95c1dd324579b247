#include "collectives.hpp"

#include <vector>

#include "streams.hpp"
#include "tensors.hpp"

namespace kvpp_device {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(host(tensor));
  return result;
}

TensorLists on_host(const TensorLists& lists) {
  TensorLists result;
  for (const auto& list : lists) result.push_back(on_host(list));
  return result;
}

// A submitted collective: who waits for it is the stream that is current then, never the host.
struct Submitted final : c10d::Work {
  EventPtr event = std::make_shared<Event>();
  int64_t stream = current_id();

  explicit Submitted(c10d::OpType type) : Work(-1, type) { record(event, stream); }
  bool isCompleted() override {
    Lock lock(event->mutex);
    return event->reached >= event->recorded;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (stream != current_id()) block(event, current_id());
  }
};

struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;

  Collectives(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size)
      : Backend(rank, size), inner(std::move(inner)) {}
  const std::string getBackendName() const override { return "kvppccl"; }

  template <typename F>
  WorkPtr submit(c10d::OpType type, F start) {
    ++current().collectives;
    current().push([start]() mutable { start()->wait(); });
    return c10::make_intrusive<Submitted>(type);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return submit(c10d::OpType::BROADCAST, [this, tensors = on_host(tensors), options]() mutable {
      return inner->broadcast(tensors, options);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return submit(c10d::OpType::ALLREDUCE, [this, tensors = on_host(tensors), options]() mutable {
      return inner->allreduce(tensors, options);
    });
  }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return submit(c10d::OpType::ALLGATHER, [this, out = on_host(out), in = on_host(in), options]() mutable {
      return inner->allgather(out, in, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return submit(c10d::OpType::_ALLGATHER_BASE, [this, out = host(out), in = host(in), options]() mutable {
      return inner->_allgather_base(out, in, options);
    });
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& options) override {
    return submit(c10d::OpType::GATHER, [this, out = on_host(out), in = on_host(in), options]() mutable {
      return inner->gather(out, in, options);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return submit(c10d::OpType::_REDUCE_SCATTER_BASE, [this, out = host(out), in = host(in), options]() mutable {
      return inner->_reduce_scatter_base(out, in, options);
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return submit(c10d::OpType::SEND, [this, tensors = on_host(tensors), to, tag]() mutable {
      return inner->send(tensors, to, tag);
    });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return submit(c10d::OpType::RECV, [this, tensors = on_host(tensors), from, tag]() mutable {
      return inner->recv(tensors, from, tag);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    drain_all();
    return inner->barrier(options);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { inner->setTimeout(timeout); }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size) {
  return c10::make_intrusive<Collectives>(std::move(inner), rank, size);
}

}  // namespace kvpp_device
