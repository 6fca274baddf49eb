// Score a prompt, pick a worker, and report the request's end.
//
//   make && ./build/score --address 127.0.0.1:50051 --model m --tokens prompt.json
#include <getopt.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvindexd/v1/index.grpc.pb.h"

namespace pb = kvindexd::v1;

// gRPC itself retries by this. UNAVAILABLE: kvindexd restarts, or no worker is live just now.
// RESOURCE_EXHAUSTED: it sheds load and asks to be tried again in a few milliseconds.
constexpr char kRetries[] = R"({"methodConfig": [{
  "name": [{"service": "kvindexd.v1.KVIndex"}],
  "retryPolicy": {
    "maxAttempts": 4, "initialBackoff": "0.02s", "maxBackoff": "0.5s", "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]
  }
}]})";

struct Args {
  std::string address = "127.0.0.1:50051", model, tokens, ca;
  double deadline = 2;
};

[[noreturn]] void Usage(const std::string& problem) {
  std::cerr << problem << "\nusage: score --tokens FILE [--address HOST:PORT] [--model NAME]"
            << " [--deadline SECONDS] [--ca FILE]\n";
  std::exit(2);
}

Args Parse(int argc, char** argv) {
  static const option kOptions[] = {{"address", required_argument, nullptr, 'a'},
                                    {"model", required_argument, nullptr, 'm'},
                                    {"tokens", required_argument, nullptr, 't'},
                                    {"deadline", required_argument, nullptr, 'd'},
                                    {"ca", required_argument, nullptr, 'c'},
                                    {nullptr, 0, nullptr, 0}};
  Args args;
  for (int c; (c = getopt_long(argc, argv, "", kOptions, nullptr)) != -1;) {
    if (c == 'a') args.address = optarg;
    else if (c == 'm') args.model = optarg;
    else if (c == 't') args.tokens = optarg;
    else if (c == 'c') args.ca = optarg;
    else if (c == 'd') args.deadline = std::atof(optarg);
    else Usage("unknown option");
  }
  if (args.tokens.empty()) Usage("--tokens is missing");
  if (!(args.deadline > 0)) Usage("--deadline: not a number of seconds");
  return args;
}

std::string ReadFile(const std::string& flag, const std::string& name) {
  std::ifstream file(name);
  if (name != "-" && !file) throw std::runtime_error(flag + " " + name + ": cannot be read");
  std::istream& in = name == "-" ? std::cin : file;
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

// A JSON list of token ids, as little-endian uint32: what kvindexd reads fastest.
std::string ReadTokens(const std::string& name) {
  const std::string text = ReadFile("--tokens", name);
  std::string packed;
  if (text.find_first_not_of("[]0123456789, \t\r\n") != std::string::npos ||
      text.find('[') == std::string::npos)
    throw std::runtime_error("--tokens " + name + ": expected token ids like [1, 2, 3]");
  for (const char *at = text.c_str(), *end = at + text.size(); at < end;) {
    if (*at < '0' || *at > '9') {
      ++at;
      continue;
    }
    char* next;
    const uint64_t token = std::strtoull(at, &next, 10);
    if (token > UINT32_MAX) throw std::runtime_error("--tokens " + name + ": an id over 2**32-1");
    for (int shift = 0; shift < 32; shift += 8) packed += static_cast<char>(token >> shift);
    at = next;
  }
  return packed;
}

const char* Advice(grpc::StatusCode code) {
  switch (code) {
    case grpc::NOT_FOUND:
      return "no worker of this model is registered; the message lists the models that are "
             "known: correct --model, or add the worker (kvindexd workers add)";
    case grpc::UNAVAILABLE:
      return "nothing answers at --address, or no worker can take the request; see whether "
             "kvindexd runs and what `kvindexd workers list` says; a gateway now uses its own "
             "policy";
    case grpc::RESOURCE_EXHAUSTED:
      return "still refused after 4 attempts: the prompt is longer than limits.max_prompt_tokens, "
             "or kvindexd is overloaded; the message says which; a gateway now uses its own policy";
    case grpc::DEADLINE_EXCEEDED:
      return "no answer in time; a gateway now uses its own policy, a person may raise --deadline";
    case grpc::UNAUTHENTICATED:
      return "kvindexd wants to know who asks: set KVINDEXD_TOKEN to a token of role score";
    case grpc::INVALID_ARGUMENT:
      return "the request is wrong; the message names the field";
    default:
      return "not expected; see the log of kvindexd";
  }
}

const char* Name(grpc::StatusCode code) {
  switch (code) {
    case grpc::NOT_FOUND: return "NOT_FOUND";
    case grpc::UNAVAILABLE: return "UNAVAILABLE";
    case grpc::RESOURCE_EXHAUSTED: return "RESOURCE_EXHAUSTED";
    case grpc::DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
    case grpc::UNAUTHENTICATED: return "UNAUTHENTICATED";
    case grpc::INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    default: return "status";
  }
}

struct Failed {
  grpc::Status status;
};

class Index {
 public:
  // With args.ca it speaks TLS.
  explicit Index(const Args& args) : deadline_(args.deadline) {
    if (const char* token = std::getenv("KVINDEXD_TOKEN")) token_ = token;
    auto credentials = grpc::InsecureChannelCredentials();
    if (!args.ca.empty()) credentials = grpc::SslCredentials({ReadFile("--ca", args.ca), "", ""});
    grpc::ChannelArguments arguments;
    arguments.SetServiceConfigJSON(kRetries);
    stub_ =
        pb::KVIndex::NewStub(grpc::CreateCustomChannel(args.address, credentials, arguments));
  }

  pb::ScoreWorkersResponse Score(const pb::ScoreWorkersRequest& request) {
    return Call<pb::ScoreWorkersResponse>(&pb::KVIndex::Stub::ScoreWorkers, request);
  }
  pb::PickWorkerResponse Pick(const pb::PickWorkerRequest& request) {
    return Call<pb::PickWorkerResponse>(&pb::KVIndex::Stub::PickWorker, request);
  }
  void Complete(const pb::CompleteRequestRequest& request) {
    Call<pb::CompleteRequestResponse>(&pb::KVIndex::Stub::CompleteRequest, request);
  }

 private:
  template <class Response, class Method, class Request>
  Response Call(Method method, const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::microseconds(static_cast<int64_t>(1e6 * deadline_)));
    if (!token_.empty()) context.AddMetadata("authorization", "Bearer " + token_);
    Response response;
    const grpc::Status status = ((*stub_).*method)(&context, request, &response);
    if (!status.ok()) throw Failed{status};
    return response;
  }

  double deadline_;
  std::string token_;
  std::unique_ptr<pb::KVIndex::Stub> stub_;
};

std::string FreshId() {
  std::random_device random;
  char text[33];
  std::snprintf(text, sizeof text, "%08x%08x%08x%08x", random(), random(), random(), random());
  return text;
}

void Table(const pb::ScoreWorkersResponse& answer) {
  std::printf("%u tokens, %u blocks\n", answer.prompt_tokens(), answer.prompt_blocks());
  const char* format = "%-16s  %-4s  %-24s  %-8s  %-6s  %-8s  %s\n";
  std::printf(format, "worker", "rank", "address", "reusable", "active", "cost", "state");
  for (const auto& s : answer.scores()) {
    char cost[32];
    std::snprintf(cost, sizeof cost, "%.1f", s.cost());
    std::printf(format, s.worker_id().c_str(), std::to_string(s.dp_rank()).c_str(),
                s.address().c_str(), std::to_string(s.reusable_tokens()).c_str(),
                std::to_string(s.active_blocks()).c_str(), cost,
                pb::WorkerState_Name(s.state()).c_str());
  }
}

// Reports the end of a request whatever becomes of it: until then it is load of its worker.
class InFlight {
 public:
  InFlight(Index& index, std::string id) : index_(index) { request_.set_request_id(id); }
  ~InFlight() {
    try {
      // The engine's `usage` may be told here, too: cached_tokens and prompt_tokens.
      index_.Complete(request_);
      std::printf("completed %s\n", request_.request_id().c_str());
    } catch (const Failed& failed) {
      // The lease of the pick ends it.
      std::cerr << "not completed: " << failed.status.error_message() << "\n";
    }
  }

 private:
  Index& index_;
  pb::CompleteRequestRequest request_;
};

// What a gateway does with one request.
void Serve(Index& index, const pb::ScoreWorkersRequest& asked) {
  pb::PickWorkerRequest request;
  *request.mutable_score() = asked;
  // With an id of our own a retried pick replaces the first instead of counting as load twice.
  request.set_request_id(FreshId());
  const pb::PickWorkerResponse pick = index.Pick(request);
  InFlight in_flight(index, pick.request_id());
  std::string others;
  for (const auto& f : pick.fallbacks()) others += (others.empty() ? "" : ", ") + f.address();
  std::printf("picked %s at %s, after it %s\n", pick.worker().worker_id().c_str(),
              pick.worker().address().c_str(), others.empty() ? "nobody" : others.c_str());
  // Here the request goes to pick.worker().address(), and the answer to the client.
}

int main(int argc, char** argv) {
  const Args args = Parse(argc, argv);
  try {
    pb::ScoreWorkersRequest asked;
    asked.mutable_prompt()->set_model(args.model);
    asked.mutable_prompt()->set_token_ids(ReadTokens(args.tokens));
    Index index(args);
    Table(index.Score(asked));
    Serve(index, asked);
  } catch (const Failed& failed) {
    std::cerr << Name(failed.status.error_code()) << ": " << failed.status.error_message()
              << "\n  " << Advice(failed.status.error_code()) << "\n";
    return 1;
  } catch (const std::runtime_error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
